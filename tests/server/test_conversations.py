"""Sequences of several requests: with `sequence_batching` that is not iterative, each request continues a
conversation."""

import asyncio
import re
import subprocess
import sys

import pytest

from harness import clients
from harness.clients import GrpcStream, Refused, described, generate
from harness.repository import FULL_ANSWER, ROOT, STORIES, TIGHT, add_model, add_synthetic
from harness.server import Server, assert_blocks_come_back, num_pending, until
from harness.synthetic import ENDLESS, ENDLESS_SEQ_LEN, Gate, continuation

IDLE = "max_sequence_idle_microseconds: 3600000000"
CONTROLS = """
control_input [
  { name: "START" control [{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }] },
  { name: "END" control [{ kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] }] },
  { name: "READY" control [{ kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] }] },
  { name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }] }
]
"""


def batching(strategy, *fields):
    return f"max_batch_size: 8 sequence_batching {{ {IDLE} {strategy} {' '.join(fields)} }}"


OLDEST = batching("oldest { max_candidate_sequences: 32 }")
DIRECT = batching("direct {}")
STRATEGIES = {
    "oldest": OLDEST,
    "direct": DIRECT,
    "in_order": batching("oldest { max_candidate_sequences: 32 preserve_ordering: true }"),
    "oldest_controls": batching("oldest { max_candidate_sequences: 32 }", CONTROLS),
    "direct_controls": batching("direct {}", CONTROLS),
}
IDS = 'input [{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }]'
# The example of the book: the model's configuration, and the client.
PAGE = (ROOT / "docs/src/conversations.md").read_text()
(EXAMPLE_MODEL,) = re.findall(r"^```\n(max_batch_size.*?)^```$", PAGE, re.M | re.S)
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
# Blocks of four positions, a hundred and sixty of them.
FEW_BLOCKS = {**TIGHT, "batch_scheduler_policy": "guaranteed_no_evict"}


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    repository = tmp_path_factory.mktemp("conversations") / "repository"
    for name, fields in STRATEGIES.items():
        add_synthetic(repository, name, {"max_seq_len": ENDLESS_SEQ_LEN}, fields=fields)
    add_synthetic(repository, "tight", {**TIGHT, "synthetic_step_us": 200}, fields=OLDEST)
    add_synthetic(repository, "overlap", {"enable_trt_overlap": "true"}, fields=OLDEST)
    add_synthetic(repository, "few_blocks", FEW_BLOCKS, fields=OLDEST)
    add_synthetic(repository, "no_reuse", {"enable_kv_cache_reuse": "false"}, fields=OLDEST)
    add_synthetic(repository, "two", fields=batching("oldest { max_candidate_sequences: 2 }"))
    add_synthetic(repository, "impatient", FEW_BLOCKS, fields=OLDEST.replace(IDLE, "max_sequence_idle_microseconds: 1000000"))
    add_synthetic(
        repository,
        "iterative_controls",
        fields=f"sequence_batching {{ {IDLE} iterative_sequence: true {CONTROLS} }}",
    )
    add_model(repository, "stories", fields=f"{OLDEST} {FULL_ANSWER}", checkpoint=STORIES)
    add_model(repository, "documented", fields=EXAMPLE_MODEL, checkpoint=STORIES)
    add_model(repository, "stories_ids", fields=f"{OLDEST} {IDS}", checkpoint=STORIES)
    add_model(repository, "stories_ids_tight", TIGHT, fields=f"{DIRECT} {IDS}", checkpoint=STORIES)
    add_model(repository, "stories_alone", fields=IDS, checkpoint=STORIES)
    with Server(repository) as server:
        yield server


class Conversation:
    """A conversation, and the tokens that it has so far. Each has an id of its own."""

    num = 0

    def __init__(self, client, model, id=None):
        Conversation.num += 1
        self.client, self.model = client, model
        self.id = id or Conversation.num
        self.tokens = []

    def stream(self, prompt, *, start=False, end=False, **options):
        sequence = {"sequence_id": self.id, "sequence_start": start, "sequence_end": end}
        options = {"stream": True, "exclude_input_in_output": True, **options}
        return GrpcStream(self.client, self.model, prompt, sequence=sequence, **options)

    async def ask(self, prompt, **options):
        """The whole answer to a turn."""

        async def collect():
            return clients.Answer([response async for response in self.stream(prompt, **options)])

        answer = await asyncio.wait_for(collect(), clients.TIMEOUT_S)
        self.tokens = self.tokens + [*prompt, *answer.ids]
        return answer

    async def check(self, prompt, max_tokens=7, **options):
        """A turn of the synthetic runner, whose tokens follow from all before."""
        before = [] if options.get("start") else self.tokens
        expected = continuation([*before, *prompt], max_tokens)
        answer = await self.ask(prompt, max_tokens=max_tokens, **options)
        assert answer.ids == expected
        assert answer.last.num_input_tokens == len(before) + len(prompt)
        self.tokens = [*before, *prompt, *expected]
        return answer


def num_reused(answer):
    return int(answer.last.tensors["kv_cache_reused_blocks"].item())


def talk(server, main):
    async def run():
        async with clients.grpc(server) as client:
            return await main(client)

    return clients.run(run())


@pytest.mark.parametrize("model", [*STRATEGIES, "tight", "overlap", "no_reuse"])
def test_each_turn_continues_the_ones_before(talks, model):
    """More conversations than there are slots in a step, each of them with turns of several lengths."""

    async def one(client, n):
        conversation = Conversation(client, model, id=f"text {n}" if n % 3 == 0 and "controls" not in model else None)
        await conversation.check([n, 1, 2], start=True)
        for turn in range(3):
            await conversation.check([n, turn] * (1 + n % 4), max_tokens=1 + 3 * turn, stream=n % 2 == 0)
        await conversation.check([n], end=True)

    async def main(client):
        await asyncio.gather(*(one(client, n) for n in range(24)))

    talk(talks, main)
    assert_blocks_come_back(talks, model)


SAMPLED = {
    "max_tokens": 12,
    "temperature": 1.0,
    "seed": 5,
    "repetition_penalty": 1.2,
    "ignore_eos": True,
    "exclude_input_in_output": True,
    "return_log_probs": True,
    "logprobs": 2,
}


@pytest.mark.parametrize("model", ["stories_ids", "stories_ids_tight"])
def test_a_turn_is_bit_for_bit_the_request_with_the_whole_text(talks, model):
    """While others use the same blocks; `stories_ids_tight` pauses sequences."""

    async def one(client, n):
        conversation = Conversation(client, model)
        turns = []
        for turn in range(4):
            prompt = [300 + n, *range(400 + turn, 410 + turn)]
            whole = [*conversation.tokens, *prompt]
            answer = await conversation.ask(prompt, start=turn == 0, end=turn == 3, **SAMPLED)
            turns.append((whole, answer))
        return turns

    async def main(client):
        return await asyncio.gather(*(one(client, n) for n in range(10)))

    turns = [turn for turns in talk(talks, main) for turn in turns]
    alone = clients.streams(talks, "stories_alone", [(whole, {**SAMPLED, "stream": True}) for whole, _ in turns])
    assert [described(answer) for _, answer in turns] == [described(answer) for answer in alone]


def test_texts_are_continued_token_by_token(talks):
    """The answer begins with what its own turn has brought, which gets no special tokens unless it is the first."""

    async def main(client):
        conversation = Conversation(client, "stories")
        whole = []
        for turn, text in enumerate(["Once upon a time", " The fox was", " and"]):
            options = {"max_tokens": 8, "ignore_eos": True, "stream": False}
            stream = conversation.stream(text, start=turn == 0, exclude_input_in_output=False, **options)
            (response,) = [response async for response in stream if response.arrays]
            own = response.ids
            assert response.text.startswith(text)
            (alone,) = [
                response
                async for response in GrpcStream(
                    client, "stories_alone", [*whole, *own[:-8]], **options, exclude_input_in_output=True
                )
                if response.arrays
            ]
            assert own[-8:] == alone.ids
            whole += own
            assert response.num_input_tokens == len(whole) - 8
        return whole

    whole = talk(talks, main)
    first = whole[0]
    assert whole.count(first) == 1, "only the first turn begins with the beginning of a text"


def test_the_example_of_the_book_prints_each_turn_with_its_answer(talks):
    turns = re.findall(r'^turn\("(.*?)"', EXAMPLE, re.M)
    program = EXAMPLE.replace("localhost:8001", talks.grpc_url).replace('"stories"', '"documented"')
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=clients.TIMEOUT_S, check=True).stdout

    async def main(client):
        conversation = Conversation(client, "stories")
        flags = [{"start": True}, {}, {"end": True}]
        return [
            (await conversation.ask(text, max_tokens=40, stream=False, **flag)).text for text, flag in zip(turns, flags)
        ]

    answers = talk(talks, main)
    assert all(answers) and len(set(answers)) == 3
    assert printed == "".join(f"{text} {answer}\n" for text, answer in zip(turns, answers))


@pytest.mark.parametrize("model", ["oldest", "direct"])
def test_a_second_turn_waits_for_the_first(talks, model):
    async def main(client):
        conversation = Conversation(client, model)
        first = aiter(conversation.stream([1, 2], start=True, max_tokens=300))
        ids = (await anext(first)).ids
        conversation.tokens = [1, 2, *continuation([1, 2], 300)]
        # Sent while the first generates.
        second = asyncio.create_task(conversation.check([3]))
        async for response in first:
            ids = ids + (response.ids or [])
        assert ids == continuation([1, 2], 300)
        await second

    talk(talks, main)


@pytest.mark.cancelling
def test_with_direct_no_more_than_sixteen_turns_wait(talks):
    async def main(client):
        conversation = Conversation(client, "direct")
        first = conversation.stream([1, 2], start=True, max_tokens=ENDLESS)
        responses = aiter(first)
        await anext(responses)
        waiting = [asyncio.create_task(conversation.ask([n], max_tokens=1)) for n in range(17)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=clients.TIMEOUT_S)
        (refused,) = done
        with pytest.raises(Refused, match="16 turns of this conversation wait already"):
            refused.result()
        first.cancel()
        with pytest.raises(Refused):
            async for _ in responses:
                pass
        answers = await asyncio.gather(*(task for task in waiting if task is not refused))
        assert [len(answer.ids) for answer in answers] == [1] * 16

    talk(talks, main)


@pytest.mark.parametrize("model", ["oldest", "direct"])
@pytest.mark.cancelling
def test_a_cancelled_turn_has_said_nothing(talks, model):
    async def main(client):
        conversation = Conversation(client, model)
        await conversation.check([1, 2], start=True)
        cancelled = conversation.stream([3], max_tokens=ENDLESS)
        with pytest.raises(Refused) as refused:
            async for _ in cancelled:
                cancelled.cancel()
        assert refused.value.status == "StatusCode.CANCELLED"
        await conversation.check([4])

    talk(talks, main)
    assert_blocks_come_back(talks, model)


@pytest.mark.cancelling
def test_a_turn_that_is_cancelled_while_it_waits_in_triton_ends_the_conversation(talks):
    """Triton's sequence batcher gives the rest of the sequence up."""

    async def main(client):
        conversation = Conversation(client, "oldest")
        first = aiter(conversation.stream([1], start=True, max_tokens=1000))
        await anext(first)
        cancelled = conversation.stream([2], max_tokens=5)
        read = asyncio.create_task(anext(aiter(cancelled)))
        await until(lambda: num_pending(talks, "oldest") == 1)
        cancelled.cancel()
        with pytest.raises(Refused):
            await read
        async for _ in first:
            pass
        with pytest.raises(Refused, match="START"):
            await conversation.check([3])
        await conversation.check([4], start=True, end=True)

    talk(talks, main)


def test_a_refused_turn_has_said_nothing(talks):
    async def main(client):
        conversation = Conversation(client, "oldest")
        await conversation.check([1, 2], start=True)
        for options, words in [
            ({"temperature": "hot"}, "temperature"),
            ({"n": 2, "temperature": 1.0}, "asks for 2 sequences, and one answer is continued"),
        ]:
            with pytest.raises(Refused, match=words):
                await conversation.ask([3], max_tokens=3, **options)
        await conversation.check([4])
        # The last turn is not continued.
        answer = await conversation.ask([5], max_tokens=3, n=2, temperature=1.0, end=True, exclude_input_in_output=True)
        assert len(answer.sequences()) == 2

    talk(talks, main)


@pytest.mark.parametrize("model", ["oldest", "direct"])
def test_a_start_begins_anew(talks, model):
    async def main(client):
        conversation = Conversation(client, model)
        for n in range(3):
            await conversation.check([n, 2], start=True)
            await conversation.check([n])
        await conversation.check([9], start=True, end=True)
        with pytest.raises(Refused, match="START"):
            await conversation.ask([1], max_tokens=1)

    talk(talks, main)


@pytest.mark.parametrize(("model", "nothing"), [("oldest", []), ("stories", "")])
def test_an_end_without_a_prompt_only_ends_the_conversation(talks, model, nothing):
    async def main(client):
        conversation = Conversation(client, model)
        await conversation.ask("a" if model == "stories" else [1], start=True, max_tokens=3, stream=False)
        answer = await conversation.ask(nothing, end=True)
        assert not answer.ids and answer.finish_reason == "cancelled"
        with pytest.raises(Refused, match="START"):
            await conversation.ask("b" if model == "stories" else [2], max_tokens=1)

    talk(talks, main)


def test_a_conversation_that_is_too_long_says_so(talks):
    async def main(client):
        conversation = Conversation(client, "few_blocks")
        await conversation.check([7] * 200, start=True, max_tokens=30)
        with pytest.raises(Refused, match="has 230 tokens, and this turn adds 30 .* max_seq_len = 256: .*sequence_start"):
            await conversation.ask([7] * 30, max_tokens=1)
        await conversation.check([8], max_tokens=5)

    talk(talks, main)


async def churn(client, model):
    """Requests that use all blocks of `FEW_BLOCKS` several times."""
    await asyncio.gather(
        *(Conversation(client, model).check([n, 3] * 40, start=True, end=True, cache_salt=str(n)) for n in range(30))
    )


PREFIX = list(range(100, 200))
FIGURES = {"return_perf_metrics": True}


def test_the_blocks_of_a_conversation_outlast_those_of_others(talks):
    """Of 107 tokens, 26 blocks of four are full."""

    async def main(client):
        conversation = Conversation(client, "few_blocks")
        await conversation.check(PREFIX, start=True)
        await churn(client, "few_blocks")
        assert num_reused(await conversation.check([1], **FIGURES)) == 26
        await churn(client, "few_blocks")
        assert num_reused(await conversation.check([1], end=True, **FIGURES)) > 26
        # It has ended: its blocks are like all others.
        await churn(client, "few_blocks")
        other = Conversation(client, "few_blocks")
        assert num_reused(await other.check(PREFIX, start=True, end=True, **FIGURES)) == 0

    talk(talks, main)
    assert_blocks_come_back(talks, "few_blocks")


def test_conversations_do_not_starve_others(talks):
    """Twenty conversations of 26 blocks, and 160 blocks: the least recent lose theirs, and everybody is served."""

    async def main(client):
        conversations = [Conversation(client, "few_blocks") for _ in range(20)]
        for n, conversation in enumerate(conversations):
            await conversation.check([n, *PREFIX], start=True)
        await Conversation(client, "few_blocks").check([9] * 250, start=True, end=True, max_tokens=6)
        await asyncio.gather(*(conversation.check([1], end=True) for conversation in conversations))

    talk(talks, main)


def test_an_idle_conversation_ends_and_gives_its_blocks_up(talks):
    """Triton ends the sequence one second after its last request, and the backend one second after its last turn."""

    async def num_left(client):
        """How many blocks of the conversation outlast a churn."""
        await churn(client, "impatient")
        other = Conversation(client, "impatient")
        return num_reused(await other.check(PREFIX, start=True, end=True, **FIGURES))

    async def main(client):
        conversation = Conversation(client, "impatient")
        await conversation.check(PREFIX, start=True)
        for _ in range(200):
            if await num_left(client) < 25:
                break
        # Where the conversation ended in the middle of a churn, some of its blocks outlasted that one.
        assert await num_left(client) == 0
        with pytest.raises(Refused, match="START"):
            await conversation.ask([1], max_tokens=1)

    talk(talks, main)


def test_conversations_beyond_the_slots_wait_for_others_to_end(talks):
    async def main(client):
        first, second, third = (Conversation(client, "two") for _ in range(3))
        await first.check([1], start=True)
        await second.check([2], start=True)
        waiting = asyncio.create_task(third.check([3], start=True))
        await until(lambda: num_pending(talks, "two") == 1)
        await second.check([4])
        assert not waiting.done()
        await first.check([5], end=True)
        await waiting
        await asyncio.gather(second.check([6], end=True), third.check([6], end=True))

    talk(talks, main)


@pytest.mark.cancelling
def test_in_order_an_answer_waits_for_those_before_it(talks):
    """With `preserve_ordering`, a short turn of one conversation ends after the long turn of another."""

    async def main(client):
        long = Conversation(client, "in_order").stream([1], start=True, max_tokens=ENDLESS)
        await anext(aiter(long))
        num_ended = num_answers(talks, "in_order")
        short = asyncio.create_task(Conversation(client, "in_order").ask([2], start=True, end=True, max_tokens=3))
        await until(lambda: num_answers(talks, "in_order") == num_ended + 1)
        # It has ended, and its answer waits.
        assert not short.done()
        long.cancel()
        return await short

    assert talk(talks, main).ids == continuation([2], 3)


def num_answers(server, model):
    """How many requests have ended."""
    return server.metrics().get(("nv_inflight_e2e_seconds_count", (("model", model), ("version", "1"))), 0)


def test_a_request_of_no_conversation_is_refused(talks):
    with pytest.raises(Refused, match="must specify a non-zero or non-empty correlation ID"):
        generate(talks, "oldest", [1, 2], max_tokens=3)


def test_controls_are_accepted_with_iterative_sequences(talks):
    assert generate(talks, "iterative_controls", [1, 2], max_tokens=9).ids[-9:] == continuation([1, 2], 9)


@pytest.mark.parametrize("model", ["oldest", "direct"])
def test_a_model_unloads_with_an_open_conversation(repository, model):
    add_synthetic(repository, model, fields=STRATEGIES[model])
    with Server(repository) as server:

        async def main(client):
            conversation = Conversation(client, model)
            await conversation.check([1, 2], start=True)
            await asyncio.to_thread(server.unload, model)
            await asyncio.to_thread(server.wait_for_state, model, "UNAVAILABLE")
            assert await asyncio.to_thread(server.load, model) is None
            with pytest.raises(Refused, match="START"):
                await conversation.ask([3], max_tokens=1)
            await conversation.check([4], start=True)
            await conversation.check([5], end=True)

        talk(server, main)


@pytest.mark.parametrize("model", ["oldest", "direct"])
def test_a_server_that_stops_ends_open_conversations(repository, model):
    """Triton waits for their sequences to end, which no client does."""
    add_synthetic(repository, model, fields=STRATEGIES[model])
    with Server(repository) as server:

        async def main(client):
            for prompt in ([1, 2], [3], [4, 5, 6]):
                await Conversation(client, model).check(prompt, start=True)

        talk(server, main)
        assert server.stop() == 0
        assert "the server stops: 3 open conversations are ended" in server.log()
        assert "Timeout 20:" not in server.log(), "of 30 s"


def test_a_step_that_fails_answers_the_turns_that_wait(repository, tmp_path):
    gate = Gate(tmp_path / "gate", num_steps=2)
    parameters = {"synthetic_gate": gate.file, "synthetic_fail_after": 5}
    add_synthetic(repository, "fails", parameters, fields=DIRECT)
    with Server(repository) as server:

        async def main(client):
            conversation = Conversation(client, "fails")
            first = aiter(conversation.stream([1], start=True, max_tokens=20))
            await anext(first)
            waiting = [asyncio.create_task(conversation.ask([n], max_tokens=1)) for n in range(3)]
            gate.open()
            with pytest.raises(Refused, match="told to fail"):
                async for _ in first:
                    pass
            for answer in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(answer, Refused) and "told to fail" in str(answer)

        talk(server, main)
