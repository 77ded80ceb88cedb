"""LoRA adapters that requests bring in `lora_weights` and `lora_config`, as TensorRT-LLM's clients send them."""

import asyncio
import itertools
import json
import time

import ml_dtypes
import numpy
import pytest

from harness import clients, seeds
from harness.adapters import RANK, adapter_rows, page_bytes, rows_inputs, write_rows
from harness.clients import GrpcStream, Refused, described, generate, grpc, streams
from harness.repository import ALLOW_OLDEST, ROOT, STORIES, add_model
from harness.server import Server

FIXTURES = ROOT / "tests" / "fixtures"
PROMPT = "Once upon a time"
NUM_KEPT = 16
NUM_ADAPTERS = 40
NUM_CLIENTS = 64
# Values behind the weights in each of its rows: 64 MiB together, which many steps copy.
MANY_VALUES = (64 << 20) // 2 // len(adapter_rows(0)[1])


def adapter_inputs(weights_type="TYPE_FP16", num_columns=3, prompt='name: "text_input" data_type: TYPE_STRING dims: [ 1 ]'):
    return f"""input [
      {{ {prompt} }},
      {{ name: "lora_weights" data_type: {weights_type} dims: [ -1, -1 ] optional: true allow_ragged_batch: true }},
      {{ name: "lora_config" data_type: TYPE_INT32 dims: [ -1, {num_columns} ] optional: true allow_ragged_batch: true }}
    ]"""


OLDEST = (
    f"{ALLOW_OLDEST} sequence_batching {{ oldest {{ max_candidate_sequences: 64 }} iterative_sequence: true "
    "max_sequence_idle_microseconds: 60000000 }"
)
QUEUED = "dynamic_batching {}"
DRIVERS = {"oldest": OLDEST, "queued": QUEUED}


@pytest.fixture(scope="module")
def uploads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uploads")
    repository, numbered = folder / "repository", folder / "numbered"
    for index in range(NUM_ADAPTERS):
        write_rows(numbered / str(index), *adapter_rows(index))
    few = {"lora_cache_host_memory_bytes": NUM_KEPT * page_bytes() + 1}
    for name, fields in DRIVERS.items():
        fields = f"{fields} {adapter_inputs()}"
        add_model(repository, name, {"stats_file": repository / f"{name}.jsonl"}, fields=fields, checkpoint=STORIES)
        add_model(repository, f"{name}_few", few, fields=fields, checkpoint=STORIES)
    add_model(
        repository, "both", {"lora_prefetch_dir": numbered}, fields=f"{OLDEST} {adapter_inputs()}", checkpoint=STORIES
    )
    add_model(repository, "files", {"lora_prefetch_dir": numbered}, checkpoint=STORIES)
    add_model(repository, "small", {"lora_cache_max_adapter_size": RANK - 1}, fields=f"{OLDEST} {adapter_inputs()}", checkpoint=STORIES)
    ids = 'name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true'
    for base, weights_type, num_columns in [("phi3", "TYPE_BF16", 3), ("llama-biases", "TYPE_FP32", 4)]:
        fields = f"{OLDEST} {adapter_inputs(weights_type, num_columns, ids)}"
        add_model(repository, base, {"gpt_model_path": FIXTURES / base}, fields=fields)
    with Server(repository) as server:
        server.records = lambda model: [json.loads(line) for line in (repository / f"{model}.jsonl").read_text().splitlines()]
        yield server


def ask(server, model, *requests):
    return streams(server, model, requests)


def bringing(index, prompt=PROMPT, num_extra_values=0, **options):
    """A request that brings the adapter `index` under that number."""
    options = {"max_tokens": 12, "lora_task_id": index, **options}
    return rows_inputs(prompt, *adapter_rows(index, num_extra_values)), options


def naming(index, prompt=PROMPT, **options):
    return prompt, {"max_tokens": 12, "lora_task_id": index, **options}


@pytest.mark.parametrize("model", DRIVERS)
def test_an_adapter_in_a_request_does_what_its_files_do(uploads, model):
    for index in [3, 4]:
        (expected,) = ask(uploads, "files", naming(index))
        (first,) = ask(uploads, model, bringing(index))
        assert described(first) == described(expected)
        later = ask(uploads, model, naming(index), naming(index), bringing(index))
        assert [described(answer) for answer in later] == [described(expected)] * 3
    plain = generate(uploads, model, PROMPT, max_tokens=12)
    assert plain.text == generate(uploads, "files", PROMPT, max_tokens=12).text
    assert plain.text not in [answer.text for answer in ask(uploads, model, naming(3), naming(4))]


@pytest.mark.parametrize("model, fixture, weights_type", [("phi3", "rows", "BF16"), ("llama-biases", "rows-dora", "FP32")])
def test_an_adapter_in_a_request_generates_what_peft_does(uploads, model, fixture, weights_type):
    folder = FIXTURES / "adapters" / fixture
    weights = numpy.load(folder / "model.lora_weights.npy")
    config = numpy.load(folder / "model.lora_config.npy")
    config = config.reshape(config.shape[-2:])
    if weights_type == "BF16":
        weights = weights.view(ml_dtypes.bfloat16)
    expected = json.loads((folder / "expected.json").read_text())["prompts"]
    sent = [
        (
            rows_inputs(it["prompt"], weights, config, weights_type),
            {"max_tokens": len(it["greedy"]), "lora_task_id": 5, "ignore_eos": True},
        )
        for it in expected
    ]
    answers = streams(uploads, model, sent)
    assert [answer.ids for answer in answers] == [it["greedy"] for it in expected]


@pytest.mark.parametrize("model", DRIVERS)
def test_new_weights_replace_old_ones_for_requests_that_come_later(uploads, model):
    expected = ask(uploads, "files", naming(10), naming(11), naming(10, max_tokens=200, ignore_eos=True))
    old, new, long = (described(answer) for answer in expected)

    async def main():
        async with grpc(uploads) as connection:

            async def answer(request, **options):
                prompt, own = request
                return described(await clients.stream(connection, model, prompt, **{**own, "lora_task_id": 77, **options}))

            assert await answer(bringing(10)) == old
            running = asyncio.create_task(answer(naming(10), max_tokens=200, ignore_eos=True))
            await asyncio.sleep(0.01)
            assert await answer(bringing(11)) == new
            assert await answer(naming(11)) == new
            assert await running == long
            assert await answer(bringing(10)) == old
            assert await answer(naming(10)) == old

    clients.run(main())


@pytest.mark.parametrize("model", DRIVERS)
def test_the_weights_are_loaded_once_however_often_they_are_sent(uploads, model):
    prompts = [f"{PROMPT}, number {n}" for n in range(16)]
    before = num_loaded(uploads, model)
    expected = ask(uploads, "files", *(naming(20, prompt) for prompt in prompts))
    answers = ask(uploads, model, *(bringing(20, prompt) for prompt in prompts))
    assert [described(answer) for answer in answers] == [described(answer) for answer in expected]
    assert num_loaded(uploads, model) == before + 1


def num_loaded(server, model):
    for (family, labels), value in server.metrics().items():
        if family == "nv_inflight_lora_num_loaded" and dict(labels)["model"] == model:
            return value
    return 0


@pytest.mark.parametrize("model", DRIVERS)
def test_a_large_adapter_is_copied_while_steps_go_on(uploads, model):
    """A request that names the adapter while it arrives waits for it; others generate meanwhile."""
    other = (PROMPT, {"max_tokens": 400, "ignore_eos": True})
    expected = ask(uploads, "files", naming(30), other)
    expected = [described(answer) for answer in expected]

    async def main():
        async with grpc(uploads) as connection:
            running = asyncio.create_task(clients.stream(connection, model, other[0], **other[1]))
            prompt, options = bringing(30, num_extra_values=MANY_VALUES)
            first = asyncio.create_task(clients.stream(connection, model, prompt, **options))
            answers = []
            # Until the server has read the request, nobody knows the adapter.
            deadline = time.monotonic() + clients.TIMEOUT_S
            while not answers:
                try:
                    prompt, options = naming(30)
                    answers.append(await clients.stream(connection, model, prompt, **options))
                except Refused as refused:
                    assert "'30' is not known: no request has brought it" in str(refused)
                    assert time.monotonic() < deadline
            answers.append(await first)
            return [described(answer) for answer in answers], described(await running)

    with_adapter, without = clients.run(main())
    assert with_adapter == [expected[0]] * 2 and without == expected[1]


@pytest.mark.parametrize("model", DRIVERS)
@pytest.mark.cancelling
def test_a_request_may_be_cancelled_while_its_adapter_is_copied(uploads, model):
    """Whatever has been copied is given back: as much memory as all adapters may take is free in the end."""
    (expected,) = ask(uploads, "files", naming(31))

    async def main():
        rng = seeds.rng("cancelled uploads", model)
        async with grpc(uploads) as connection:
            for _ in range(12):
                prompt, options = bringing(31, num_extra_values=MANY_VALUES)
                call = GrpcStream(connection, model, prompt, **options)

                async def read(call=call):
                    return [response async for response in call]

                reading = asyncio.create_task(read())
                await asyncio.sleep(rng.uniform(0, 0.3))
                call.cancel()
                try:
                    await reading
                except Refused as refused:
                    assert "cancel" in str(refused).lower()
            prompt, options = bringing(31, num_extra_values=MANY_VALUES)
            return await clients.stream(connection, model, prompt, **options)

    assert described(clients.run(main())) == described(expected)


@pytest.mark.parametrize("model", DRIVERS)
def test_64_clients_bring_40_adapters_where_16_have_room(uploads, model):
    """As TensorRT-LLM's clients do: an adapter that the server does not know is sent again. On a busy machine all 64
    may arrive at once, which is more than may be on the way."""
    rng = seeds.rng("uploads", model)
    sent = [[rng.randrange(NUM_ADAPTERS) for _ in range(3)] for _ in range(NUM_CLIENTS)]
    num_sent = 0

    async def client(connection, own):
        nonlocal num_sent
        answers = []
        for index in own:
            request = naming(index)
            while True:
                prompt, options = request
                try:
                    answers.append(await clients.stream(connection, f"{model}_few", prompt, **options))
                    break
                except Refused as refused:
                    if "send it again later" in str(refused):
                        await asyncio.sleep(0.05)
                        continue
                    assert "send lora_weights" in str(refused), refused
                request = bringing(index)
                num_sent += 1
        return answers

    async def main():
        async with grpc(uploads) as connection:
            return await asyncio.gather(*(client(connection, own) for own in sent))

    answers = itertools.chain(*clients.run(main()))
    expected = [described(ask(uploads, "files", naming(index))[0]) for index in range(NUM_ADAPTERS)]
    for index, answer in zip(itertools.chain(*sent), answers, strict=True):
        assert described(answer) == expected[index]
    assert num_sent > NUM_KEPT


def test_an_adapter_that_has_left_the_memory_comes_back_from_its_files(uploads):
    """A number with a folder may be sent, too, as Triton's OpenAI frontend does with the files that it has read
    itself."""
    weights = adapter_rows(13)
    (sent,) = streams(uploads, "both", [(rows_inputs(PROMPT, *weights), {"max_tokens": 12, "lora_task_id": 12})])
    of_12, of_13 = ask(uploads, "files", naming(12), naming(13))
    assert described(sent) == described(of_13)
    assert described(ask(uploads, "both", naming(12))[0]) == described(of_13)
    # Those with folders beside it, and the one without.
    assert described(ask(uploads, "both", naming(13))[0]) == described(of_13)
    with pytest.raises(Refused, match="lora_prefetch_dir has no adapter in a folder of this number, and no request has brought it"):
        ask(uploads, "both", naming(NUM_ADAPTERS))
    assert described(of_12) != described(of_13)


def changed(array, **values):
    array = array.copy()
    for place, value in values.items():
        array[0, int(place[1:])] = value
    return array


WEIGHTS, CONFIG = adapter_rows(0)
BAD = {
    "no config": (["text_input", "lora_weights"], WEIGHTS, CONFIG, {}, "has lora_weights and no lora_config"),
    "no weights": (["text_input", "lora_config"], WEIGHTS, CONFIG, {}, "has lora_config and no lora_weights"),
    "no number": (None, WEIGHTS, CONFIG, {"lora_task_id": None}, "no lora_task_id"),
    "a name": (None, WEIGHTS, CONFIG, {"lora_task_id": None, "lora_name": "7"}, "lora_weights goes with lora_task_id"),
    "another module": (None, WEIGHTS, changed(CONFIG, _0=8), {}, "has module id 8 in row 0"),
    "another layer": (None, WEIGHTS, changed(CONFIG, _1=99), {}, "row 0, attn_q of layer 99': is for a module that the model does not have"),
    "no rank": (None, WEIGHTS, changed(CONFIG, _2=0), {}, "a rank from 1"),
    "a high rank": (None, WEIGHTS, changed(CONFIG, _2=65), {}, "lora_cache_max_adapter_size is 64"),
    "short rows": (None, WEIGHTS[:, :-1], CONFIG, {}, "was trained for another model"),
    "fewer rows": (None, WEIGHTS[1:], CONFIG, {}, "modules, so ["),
    "no numbers": (None, WEIGHTS * numpy.float16("nan"), CONFIG, {}, "row 0, attn_q of layer 0"),
    "twice": (None, WEIGHTS, numpy.repeat(CONFIG[:1], len(CONFIG), axis=0), {}, "a row before has, too"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("model", DRIVERS)
def test_a_bad_adapter_is_refused_by_what_is_wrong_with_it(uploads, model, case):
    names, weights, config, options, words = BAD[case]
    inputs = rows_inputs(PROMPT, weights, config)
    if names is not None:
        inputs = [it for it in inputs if it.name() in names]
    options = {"max_tokens": 2, "lora_task_id": 900, **options}
    with pytest.raises(Refused) as refused:
        streams(uploads, model, [(inputs, {name: value for name, value in options.items() if value is not None})])
    assert words in str(refused.value), refused.value
    assert ask(uploads, model, (PROMPT, {"max_tokens": 1}))[0].text


def test_an_adapter_is_refused_that_is_too_large(uploads):
    with pytest.raises(Refused, match=f"rank {RANK}.*lora_cache_max_adapter_size is {RANK - 1}"):
        ask(uploads, "small", bringing(0))
    with pytest.raises(Refused, match="lora_weights has .* bytes, and may have at most .*lora_cache_host_memory_bytes"):
        ask(uploads, "oldest_few", bringing(0, num_extra_values=MANY_VALUES))


def test_models_that_do_not_declare_the_inputs_take_no_adapter(uploads):
    with pytest.raises(Refused, match="expected 1 inputs but got 3 inputs"):
        ask(uploads, "files", bringing(0))
    with pytest.raises(Refused, match="option 'lora_weights': an adapter comes in two input tensors"):
        generate(uploads, "files", PROMPT, max_tokens=1, lora_weights="x")
