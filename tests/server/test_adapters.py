"""LoRA adapters in a real server: requests with many of them in the same steps, a cache that holds a few, and files
that are replaced while they are in use."""

import asyncio
import concurrent.futures
import fcntl
import itertools
import json
import os
import shutil
import signal
import threading
import time

import pytest

from harness import clients, seeds
from harness.adapters import RANK, num_bytes_of_one, page_bytes, rows_of, write_adapter
from harness.clients import Refused, described, generate, grpc, streams
from harness.repository import ROOT, STORIES, add_model
from harness.server import Server

FIXTURES = ROOT / "tests" / "fixtures" / "adapters"
NUM_ADAPTERS = 200
NUM_CLIENTS = 64
NUM_KEPT = 16
NUM_TOGETHER = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for index in range(NUM_ADAPTERS):
        write_adapter(folder / str(index), index)
    shutil.copytree(FIXTURES / "all-modules", folder / "for-another-model")
    shutil.copytree(folder / "0", folder / "cut-short")
    weights = folder / "cut-short" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, folders):
    repository = tmp_path_factory.mktemp("adapters") / "repository"
    # Each takes a page.
    few = {"lora_cache_host_memory_bytes": NUM_KEPT * page_bytes() + 1}
    add_model(repository, "few", {"lora_dir": folders, **few, "stats_file": repository / "few.jsonl"}, checkpoint=STORIES)
    together = {"lora_cache_num_device_module_layer": rows_of(NUM_TOGETHER)}
    together["stats_file"] = repository / "together.jsonl"
    add_model(repository, "together", {"lora_dir": folders, **few, **together}, checkpoint=STORIES)
    add_model(
        repository,
        "queued",
        {"lora_dir": folders, **few, "stats_file": repository / "queued.jsonl"},
        fields="dynamic_batching {}",
        checkpoint=STORIES,
    )
    one = {"lora_cache_host_memory_bytes": page_bytes(max_rank=RANK) - 1, "lora_cache_max_adapter_size": RANK}
    add_model(repository, "none_fits", {"lora_dir": folders, **one}, checkpoint=STORIES)
    add_model(repository, "low_rank", {"lora_dir": folders, "lora_cache_max_adapter_size": RANK - 1}, checkpoint=STORIES)
    version = add_model(repository, "table", checkpoint=STORIES)
    table = {"poet": str(folders / "3"), "gone": str(folders / "nowhere")}
    (version / "multi_lora.json").write_text(json.dumps(table))
    base = FIXTURES.parent / "llama3"
    ids = 'input [{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }]'
    add_model(repository, "llama3", {"gpt_model_path": base, "lora_dir": FIXTURES}, fields=ids)
    numbered = folders.parent / "numbered"
    numbered.mkdir(exist_ok=True)
    for number, name in [("7", "rows"), ("8", "dora-fused")]:
        shutil.copytree(FIXTURES / name, numbered / number)
    base = FIXTURES.parent / "phi3"
    add_model(repository, "phi3", {"gpt_model_path": base, "lora_prefetch_dir": numbered}, fields=ids)
    add_model(repository, "stories", checkpoint=STORIES)
    with Server(repository) as server:
        server.records = lambda model: [json.loads(line) for line in (repository / f"{model}.jsonl").read_text().splitlines()]
        yield server


def requests(num, *names):
    rng = seeds.rng("adapters", *names)
    for _ in range(num):
        adapter = rng.choice([None, *range(NUM_ADAPTERS)])
        options = {"max_tokens": rng.choice([4, 12, 24]), "seed": rng.randrange(1000)}
        if rng.random() < 0.5:
            options["temperature"] = 1.0
        if adapter is not None:
            options[rng.choice(["lora_name", "lora_task_id"])] = adapter
        if "lora_name" in options:
            options["lora_name"] = str(adapter)
        prompt = rng.choice(["Once upon a time", "The old mill", "One day, a fox and a hen went to the river. The hen"])
        yield prompt, options


def counted(server, model):
    """The metrics and the statistics records of a model's adapters, once they agree that nothing is active."""
    families = {"nv_inflight_lora_metrics": "lora_type", "nv_inflight_lora_cache_metrics": "lora_cache_type"}
    deadline = time.monotonic() + 30
    while True:
        found = {}
        for (family, labels), value in server.metrics().items():
            labels = dict(labels)
            if labels.get("model") == model and family.startswith("nv_inflight_lora"):
                found[family, labels.get(families.get(family))] = value
        records = server.records(model)
        num_loading = found["nv_inflight_lora_cache_metrics", "loading_requests"]
        num_used = found["nv_inflight_lora_metrics", "used_pages"]
        num_loaded = found["nv_inflight_lora_num_loaded", None]
        if num_used == num_loading == 0 and records[-1]["Loaded LoRA adapters"] == num_loaded:
            return found, records
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@pytest.mark.parametrize("model, num_together", [("few", NUM_KEPT), ("queued", NUM_KEPT), ("together", NUM_TOGETHER)])
@pytest.mark.complete
def test_64_clients_get_of_200_adapters_what_each_gives_alone(adapters, model, num_together):
    sent = [list(requests(2, model, number)) for number in range(NUM_CLIENTS)]

    async def client(connection, own):
        return [await clients.stream(connection, model, prompt, **options) for prompt, options in own]

    async def main():
        async with grpc(adapters) as connection:
            return await asyncio.gather(*(client(connection, own) for own in sent))

    together = list(itertools.chain(*clients.run(main())))
    sent = list(itertools.chain(*sent))
    # One after the other, each alone; those without an adapter from a model without any.
    num_changed = 0
    for answer, (prompt, options) in zip(together, sent, strict=True):
        has_adapter = "lora_name" in options or "lora_task_id" in options
        (alone,) = streams(adapters, "few" if has_adapter else "stories", [(prompt, options)])
        assert described(answer) == described(alone), options
        if has_adapter:
            plain = {name: value for name, value in options.items() if not name.startswith("lora")}
            num_changed += streams(adapters, "stories", [(prompt, plain)])[0].ids != alone.ids
    assert num_changed > len(sent) / 2

    metrics, records = counted(adapters, model)
    cache = {name: value for (family, name), value in metrics.items() if family == "nv_inflight_lora_cache_metrics"}
    assert cache["max_pages"] == NUM_KEPT and cache["used_pages"] == cache["kept_adapters"] == NUM_KEPT
    num_loaded, num_evicted = (metrics[f"nv_inflight_lora_num_{name}", None] for name in ["loaded", "evicted"])
    assert num_loaded - num_evicted == NUM_KEPT and num_evicted > NUM_KEPT
    assert metrics["nv_inflight_lora_metrics", "max_pages"] == num_together
    running = [record["Running LoRA adapters"] for record in records]
    assert 1 < max(running) <= num_together
    assert all(record["Used LoRA pages"] == record["Running LoRA adapters"] for record in records)
    assert any(record["Loading LoRA requests"] > 0 for record in records)
    has_waited = any(record["Waiting LoRA requests"] > 0 for record in records)
    assert has_waited == (num_together < NUM_KEPT)
    last = records[-1]
    assert last["Loaded LoRA adapters"] == num_loaded and last["Evicted LoRA adapters"] == num_evicted


def test_an_adapter_generates_what_peft_does(adapters):
    for name in ["all-modules", "rank-33"]:
        expected = json.loads((FIXTURES / name / "expected.json").read_text())["prompts"]
        options = {"lora_name": name, "ignore_eos": True}
        sent = [(it["prompt"], {"max_tokens": len(it["greedy"]), **options}) for it in expected]
        answers = streams(adapters, "llama3", sent)
        assert [answer.ids for answer in answers] == [it["greedy"] for it in expected]


def test_a_number_names_a_folder_in_either_format(adapters):
    for number, name in [(7, "rows"), (8, "dora-fused")]:
        expected = json.loads((FIXTURES / name / "expected.json").read_text())["prompts"]
        options = {"lora_task_id": number, "ignore_eos": True}
        sent = [(it["prompt"], {"max_tokens": len(it["greedy"]), **options}) for it in expected]
        answers = streams(adapters, "phi3", sent)
        assert [answer.ids for answer in answers] == [it["greedy"] for it in expected]
    with pytest.raises(Refused, match="lora_prefetch_dir has no adapter in a folder of this number"):
        streams(adapters, "phi3", [([1, 2, 3], {"lora_task_id": 9})])


def test_a_table_names_adapters(adapters):
    poet = generate(adapters, "table", "Once upon a time", lora_name="poet", max_tokens=8)
    number = generate(adapters, "few", "Once upon a time", lora_task_id=3, max_tokens=8)
    nested = generate(
        adapters, "table", "Once upon a time", sampling_parameters=json.dumps({"lora_name": "poet", "max_tokens": 8})
    )
    assert poet.text == number.text == nested.text
    assert poet.text != generate(adapters, "table", "Once upon a time", max_tokens=8).text


@pytest.mark.parametrize(
    "model, options, words",
    [
        ("stories", {"lora_name": "0"}, ["lora_name", "has no adapters", "lora_dir"]),
        ("few", {"lora_name": "nobody"}, ["'nobody' is not known", "lora_dir"]),
        ("few", {"lora_name": "../few"}, ["'../few' is not known"]),
        ("few", {"lora_name": "0", "lora_task_id": 0}, ["lora_task_id", "lora_name, which is '0'"]),
        ("few", {"lora_name": "for-another-model"}, ["adapter_model.safetensors", "lora_A.weight", "another model"]),
        ("few", {"lora_name": "cut-short"}, ["adapter_model.safetensors", "not a whole safetensors file"]),
        ("few", {"lora_weights": "x"}, ["lora_weights", "two input tensors"]),
        ("table", {"lora_name": "gone"}, ["'gone' is not known", "multi_lora.json has no adapter of this name"]),
        ("none_fits", {"lora_name": "1"}, [f"takes {num_bytes_of_one()} bytes", "and there are 0", "lora_cache_host_memory_bytes"]),
        ("low_rank", {"lora_name": "1"}, [f"rank {RANK}", f"lora_cache_max_adapter_size is {RANK - 1}"]),
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused_by_name(adapters, model, options, words):
    with pytest.raises(Refused) as refused:
        generate(adapters, model, "Once upon a time", max_tokens=2, **options)
    message = str(refused.value)
    for word in words:
        assert word in message, message
    assert str(adapters.repository.parent) not in message and "poet" not in message, "of this machine, and of others"
    assert generate(adapters, model, "Once upon a time", max_tokens=1).text


def test_prefixes_are_shared_within_an_adapter_only(adapters):
    prompt = "One day, Mina went to the old mill. The sky was grey. She had a golden key that she loved. " * 2
    answers = [generate(adapters, "few", prompt, max_tokens=6, lora_name=name).text for name in ["5", "6", "5", "6"]]
    plain = [generate(adapters, model, prompt, max_tokens=6).text for model in ["few", "stories", "few"]]
    assert answers[:2] == answers[2:] and answers[0] != answers[1]
    assert len(set(plain)) == 1 and plain[0] not in answers


def test_an_adapter_is_replaced_under_load(adapters, folders):
    """Every answer comes from one of the two versions, and once the new one was seen, the old one is not seen again."""
    folder, spare = folders / "replaced", folders / "spare"
    write_adapter(folder, 1000)
    write_adapter(spare, 1001)
    prompt, options = "Once upon a time", {"max_tokens": 12, "lora_name": "replaced"}
    answers = streams(adapters, "few", [(prompt, options), (prompt, {**options, "lora_name": "spare"})])
    old, new = (answer.text for answer in answers)
    assert old != new

    async def main():
        seen = []
        async with grpc(adapters) as connection:
            while seen[-1:] != [new]:
                assert len(seen) < 1_000 and set(seen) <= {old, new}
                others = [clients.stream(connection, "few", *request[:1], **request[1]) for request in requests(3, len(seen))]
                answer, *_ = await asyncio.gather(clients.stream(connection, "few", prompt, **options), *others)
                seen.append(answer.text)
                if len(seen) == 3:
                    os.replace(spare / "adapter_model.safetensors", folder / "adapter_model.safetensors")
            for _ in range(3):
                seen.append((await clients.stream(connection, "few", prompt, **options)).text)
        return seen

    seen = clients.run(main())
    assert seen[:3] == [old] * 3
    first_new = seen.index(new)
    assert seen == [old] * first_new + [new] * (len(seen) - first_new)


def test_adapters_are_replaced_and_deleted_while_requests_run(adapters, folders):
    """Every answer comes from a version, or says that there is none at the moment; and nothing is left in use."""
    prompt, options, names = "Once upon a time", {"max_tokens": 6}, ["changing-0", "changing-1", "changing-2"]
    for version in range(2):
        write_adapter(folders / f"version-{version}", 3000 + version)
    versions = [generate(adapters, "few", prompt, lora_name=f"version-{n}", **options).text for n in range(2)]
    assert versions[0] != versions[1]
    is_over = threading.Event()

    def remove(name):
        if (folders / name).exists():
            os.rename(folders / name, folders / ".removed")
            shutil.rmtree(folders / ".removed")

    def put(name, version):
        shutil.copytree(folders / f"version-{version}", folders / ".new")
        remove(name)
        os.rename(folders / ".new", folders / name)

    def change():
        rng = seeds.rng("changes")
        while not is_over.wait(0.01):
            name = rng.choice(names)
            if rng.random() < 0.3:
                remove(name)
            else:
                put(name, rng.randrange(2))
        for name in names:
            put(name, 1)

    def ask(number):
        rng = seeds.rng("asked", number)
        num_answers = 0
        for _ in range(12):
            try:
                answer = generate(adapters, "few", prompt, lora_name=rng.choice(names), **options)
            except Refused as refused:
                words = ["is not known", "cannot be used", "change while they are read"]
                assert any(word in str(refused) for word in words), refused
            else:
                assert answer.text in versions
                num_answers += 1
        return num_answers

    with concurrent.futures.ThreadPoolExecutor(9) as threads:
        changing = threads.submit(change)
        try:
            num_answers = sum(threads.map(ask, range(8)))
        finally:
            is_over.set()
        changing.result()
    assert num_answers > 0
    for name in names:
        deadline = time.monotonic() + 300
        while generate(adapters, "few", prompt, lora_name=name, **options).text != versions[1]:
            assert time.monotonic() < deadline
    counted(adapters, "few")


def test_a_file_that_cannot_be_read_yet_holds_up_no_other_adapter(adapters, folders):
    """With a lease, the kernel lets nobody open the file until it is given back, and tells when somebody waits."""
    folder = folders / "slow"
    write_adapter(folder, 2000)
    waits = threading.Event()
    before = signal.signal(signal.SIGIO, lambda *_: waits.set())
    file = os.open(folder / "adapter_model.safetensors", os.O_RDWR)
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            slow = threads.submit(generate, adapters, "few", "Once upon a time", lora_name="slow", max_tokens=4)
            try:
                assert waits.wait(clients.TIMEOUT_S)
                loaded = [generate(adapters, "few", "Once upon a time", lora_name=str(n), max_tokens=4) for n in range(40, 44)]
                assert all(answer.text for answer in loaded)
                assert generate(adapters, "few", "Once upon a time", max_tokens=4).text
                assert not slow.done()
            finally:
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            assert slow.result().text
    finally:
        os.close(file)
        signal.signal(signal.SIGIO, before)


def test_adapters_are_refused_where_there_is_nothing_to_add_them_to(tmp_path, folders):
    add_model(tmp_path, "synthetic", {"runner": "synthetic", "lora_dir": folders})
    add_model(tmp_path, "no_folder", {"lora_dir": "nowhere"}, checkpoint=STORIES)
    with Server(tmp_path, "--model-control-mode=explicit") as server:
        assert "the synthetic runner computes no adapters" in server.load("synthetic")
        assert "nowhere: is not a folder" in server.load("no_folder")
