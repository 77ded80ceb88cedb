"""The answer to a single request: each option, over each of Triton's protocols."""

import json

import pytest

from harness import clients
from harness.clients import generate, generate_stream, infer
from harness.synthetic import continuation

PROMPT = "Once upon a time, there was a brave fox named Finn."


@pytest.fixture(scope="module")
def greedy(server):
    """The model's answer without options: the base for comparisons."""
    return generate(server, "stories", PROMPT, max_tokens=120, exclude_input_in_output=True)


def test_a_greedy_answer_is_a_story_with_sentences(greedy):
    assert greedy.text.startswith(" ")
    assert greedy.text.count(".") >= 3
    assert "Finn" in greedy.text


def test_a_full_answer_repeats_the_prompt_unless_excluded(server, greedy):
    assert generate(server, "stories", PROMPT, max_tokens=120).text == PROMPT + greedy.text


def test_every_protocol_gives_the_same_text(server, greedy):
    def grpc(model, **options):
        async def main():
            async with clients.grpc(server) as client:
                return await clients.stream(client, model, PROMPT, max_tokens=120, **options)

        return clients.run(main())

    options = {"max_tokens": 120, "exclude_input_in_output": True}
    answers = {
        "generate_stream": generate_stream(server, "stories", PROMPT, max_tokens=120),
        "gRPC, streaming": grpc("stories"),
        "gRPC, one answer": grpc("stories", stream=False, exclude_input_in_output=True),
        "generate, not decoupled": generate(server, "stories_full", PROMPT, **options),
        "infer, not decoupled": infer(server, "stories_full", PROMPT, **options),
        "gRPC, not decoupled": grpc("stories_full", stream=False, exclude_input_in_output=True),
        "strategy oldest": generate(server, "stories_oldest", PROMPT, **options),
        "dynamic batching": generate(server, "stories_queued", PROMPT, **options),
        "few blocks": generate(server, "stories_tight", PROMPT, **options),
    }
    for way, answer in answers.items():
        assert (way, answer.text, answer.ids) == (way, greedy.text, greedy.ids)
        assert (way, answer.finish_reason) == (way, greedy.finish_reason)


def test_a_stream_has_one_token_per_response_and_the_reason_with_the_last(server):
    responses = generate_stream(server, "stories", PROMPT, max_tokens=20, ignore_eos=True).responses
    assert [len(r.ids) for r in responses] == [1] * 20
    assert [r.num_output_tokens for r in responses] == list(range(1, 21))
    assert {r.num_input_tokens for r in responses} == {responses[0].num_input_tokens}
    assert [r.sequence_length for r in responses] == [r.num_input_tokens + r.num_output_tokens for r in responses]
    assert [r.finish_reason for r in responses] == [""] * 19 + ["length"]


@pytest.mark.parametrize("options", [{}, {"stop": "fox"}, {"return_log_probs": True, "logprobs": 2}])
@pytest.mark.parametrize("interval", [1, 2, 7, 1000])
def test_a_stream_can_have_several_tokens_per_response(server, interval, options):
    options = {"max_tokens": 60, "ignore_eos": True, **options}
    one_by_one = generate_stream(server, "stories", PROMPT, **options)
    several = generate_stream(server, "stories", PROMPT, stream_interval=interval, **options)
    assert (several.text, several.ids, several.finish_reason) == (
        one_by_one.text,
        one_by_one.ids,
        one_by_one.finish_reason,
    )
    num_tokens = len(one_by_one.ids)
    lengths = [len(response.ids) for response in several.responses]
    assert lengths[0] == 1 and set(lengths[1:-1]) <= {interval} and lengths[-1] <= interval
    assert sum(lengths) == num_tokens
    ends = [response.num_output_tokens for response in several.responses]
    assert ends == [sum(lengths[: n + 1]) for n in range(len(lengths))]
    if "logprobs" in options:
        of = [response.tensors["output_log_probs"] for response in several.responses]
        assert [len(some) if isinstance(some, list) else 1 for some in of] == lengths
        flat = [one for some in of for one in (some if isinstance(some, list) else [some])]
        assert flat == [response.tensors["output_log_probs"] for response in one_by_one.responses]
        entries = [entry for response in several.responses for entry in json.loads(response.tensors["logprobs"])]
        assert entries == [json.loads(response.tensors["logprobs"])[0] for response in one_by_one.responses]
    # The interval does not apply to an answer in one response.
    whole = generate(server, "stories", PROMPT, exclude_input_in_output=True, stream_interval=interval, **options)
    assert (whole.text, whole.ids) == (several.text, several.ids)


def test_a_model_that_is_not_decoupled_cannot_stream(server):
    with pytest.raises(clients.Refused, match="decoupled"):
        generate(server, "stories_full", PROMPT, stream=True)


def test_max_tokens_ends_the_answer_and_ignore_eos_continues_it(server, greedy):
    short = generate(server, "stories", PROMPT, max_tokens=7, exclude_input_in_output=True)
    assert short.ids == greedy.ids[:7]
    assert short.finish_reason == "length"
    long = generate(server, "stories", PROMPT, max_tokens=700, ignore_eos=True)
    assert long.last.num_output_tokens == 700


def test_a_story_ends_with_the_end_token(server):
    answer = generate(server, "stories", PROMPT, max_tokens=900, exclude_input_in_output=True)
    assert answer.finish_reason == "end_id"
    assert answer.text.rstrip().endswith((".", "!", '"')), "the end token is not part of the text"


def test_an_end_id_of_the_request_replaces_the_models(server, greedy):
    end_id = greedy.ids[9]
    answer = generate(server, "stories", PROMPT, max_tokens=120, end_id=end_id)
    assert answer.finish_reason == "end_id"
    assert answer.last.num_output_tokens == greedy.ids.index(end_id) + 1


def test_min_tokens_delays_the_end(server, greedy):
    end_id = greedy.ids[3]
    answer = generate(server, "stories", PROMPT, max_tokens=60, end_id=end_id, min_tokens=30)
    assert answer.last.num_output_tokens > 30


def test_a_stop_word_ends_the_text_before_it_regardless_of_token_boundaries(server, greedy):
    # A stop word from the middle of one word to the middle of the next: it spans tokens.
    middle = greedy.text.index(" ", 40)
    word = greedy.text[middle - 2 : middle + 3]
    before = greedy.text[: greedy.text.index(word)]
    whole = generate(server, "stories", PROMPT, max_tokens=120, stop=word, exclude_input_in_output=True)
    listed = generate_stream(server, "stories", PROMPT, max_tokens=120, stop=json.dumps(["nowhere", word]))
    for answer in (whole, listed):
        assert (answer.text, answer.finish_reason) == (before, "stop_words")


def test_a_stop_word_can_be_part_of_the_text(server, greedy):
    word = greedy.text[40:45]
    end = greedy.text.index(word) + len(word)
    options = {"max_tokens": 120, "stop": word, "include_stop_str_in_output": True}
    whole = generate(server, "stories", PROMPT, exclude_input_in_output=True, **options)
    for answer in (whole, generate_stream(server, "stories", PROMPT, **options)):
        assert (answer.text, answer.finish_reason) == (greedy.text[:end], "stop_words")


def test_a_stop_id_ends_the_answer_and_is_in_its_ids_but_not_in_its_text(server, greedy):
    stop_id = greedy.ids[9]
    num_tokens = greedy.ids.index(stop_id) + 1

    def answers(**options):
        options = {"max_tokens": 120, "ignore_eos": True, "stop_token_ids": json.dumps([7, stop_id]), **options}
        yield generate(server, "stories", PROMPT, exclude_input_in_output=True, **options)
        yield generate_stream(server, "stories", PROMPT, **options)

    before = generate(server, "stories", PROMPT, max_tokens=num_tokens - 1, exclude_input_in_output=True).text
    after = generate(server, "stories", PROMPT, max_tokens=num_tokens, exclude_input_in_output=True).text
    assert before != after
    for answer in answers():
        assert (answer.ids, answer.text) == (greedy.ids[:num_tokens], before)
        assert answer.finish_reason == "stop_words"
    for answer in answers(include_stop_str_in_output=True):
        assert (answer.ids, answer.text) == (greedy.ids[:num_tokens], after)
    for answer in answers(min_tokens=num_tokens + 5):
        assert stop_id not in answer.ids[: num_tokens + 5]


def test_special_tokens_are_shown_on_request(server):
    def story(**options):
        return generate(server, "stories", PROMPT, max_tokens=900, exclude_input_in_output=True, **options)

    plain, shown = story(), story(skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown.ids == plain.ids
    assert shown.text.startswith(plain.text) and shown.text.endswith(">")
    assert story(skip_special_tokens=False).text == plain.text, "the end token is not part of the text"


def test_text_can_be_disabled(server, greedy):
    answer = generate(server, "stories", PROMPT, max_tokens=120, detokenize=False, exclude_input_in_output=True)
    assert (answer.text, answer.ids) == ("", greedy.ids)


def test_a_bad_word_never_appears(server, greedy):
    word = max(set(greedy.text.replace(".", "").split()), key=greedy.text.count)
    assert f" {word}" in greedy.text
    answer = generate(server, "stories", PROMPT, max_tokens=120, bad_words=word, exclude_input_in_output=True)
    assert f" {word} " not in answer.text


def test_logit_bias_forbids_and_forces_tokens(server, greedy):
    first = greedy.ids[0]
    forbidden = generate(server, "stories", PROMPT, max_tokens=1, logit_bias=json.dumps({str(first): -1000}))
    assert forbidden.ids[-1] != first
    forced = generate(server, "stories", PROMPT, max_tokens=3, logit_bias=json.dumps({"99": 1000}))
    assert forced.ids[-3:] == [99] * 3


def test_only_allowed_tokens_are_generated(server, greedy):
    allowed = sorted(set(greedy.ids))[::2]
    answer = generate(
        server,
        "stories",
        PROMPT,
        max_tokens=50,
        temperature=1.5,
        allowed_token_ids=json.dumps(allowed),
        exclude_input_in_output=True,
    )
    assert set(answer.ids) <= set(allowed) and len(answer.ids) == 50


def test_no_ngram_occurs_twice(server):
    def runs(**options):
        ids = generate(server, "stories", PROMPT, max_tokens=300, ignore_eos=True, **options).ids
        return [tuple(ids[i : i + 3]) for i in range(len(ids) - 2)]

    assert len(set(runs())) < len(runs())
    unique = runs(no_repeat_ngram_size=3)
    assert len(set(unique)) == len(unique)


def test_an_output_that_could_only_repeat_itself_ends(server):
    allowed = json.dumps([500, 501, 502])
    options = {"allowed_token_ids": allowed, "no_repeat_ngram_size": 1, "ignore_eos": True, "max_tokens": 20}
    answers = [generate_stream(server, "stories", PROMPT, **options)]
    for more in ({}, {"n": 2, "temperature": 1.0}, {"beam_width": 2}):
        whole = infer(server, "stories_beams_full", PROMPT, exclude_input_in_output=True, **options, **more)
        answers += whole.sequences()
    assert len(answers) == 6
    for answer in answers:
        assert sorted(answer.ids) == [500, 501, 502]
        assert answer.finish_reason == "length"


def test_a_penalty_ignores_the_start_of_the_prompt_on_request(server):
    def text(**options):
        return generate(server, "stories", PROMPT, max_tokens=60, presence_penalty=30.0, **options).text

    assert text() == text(prompt_ignore_length=1000)
    assert text() != text(prompt_ignore_length=0)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9},
        {"typical_p": 0.7, "temperature": 1.2},
        {"top_p": 0.95, "runtime_top_p_decay": 0.99, "runtime_top_p_min": 0.5, "runtime_top_p_reset_ids": 5},
        {"temperature": 1.5, "top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05, "temperature": 1.2},
        {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    ],
    ids=str,
)
def test_the_seed_determines_the_text(server, greedy, options):
    def text(seed):
        return generate(server, "stories", PROMPT, max_tokens=60, seed=seed, **options).text

    assert text(1) == text(1)
    assert len({text(1), text(2), text(3), greedy.text}) == 4


def test_top_k_of_one_is_greedy_and_so_is_temperature_zero(server, greedy):
    for options in ({"top_k": 1, "seed": 3}, {"temperature": 0, "top_k": 40}):
        answer = generate(server, "stories", PROMPT, max_tokens=120, exclude_input_in_output=True, **options)
        assert answer.text == greedy.text


def test_penalties_change_a_greedy_answer(server, greedy):
    for options in ({"repetition_penalty": 1.5}, {"presence_penalty": 5.0}, {"frequency_penalty": 5.0}):
        answer = generate(server, "stories", PROMPT, max_tokens=120, exclude_input_in_output=True, **options)
        assert answer.text != greedy.text


def test_vllms_sampling_parameters_are_understood(server):
    sampling = {"temperature": 0.7, "max_tokens": 30, "seed": 5}
    nested = generate(server, "stories", PROMPT, sampling_parameters=json.dumps(sampling))
    assert nested.text == generate(server, "stories", PROMPT, **sampling).text


def test_a_conversation_goes_through_the_chat_template(server):
    messages = [{"role": "user", "content": "Tell me a story about a penguin named Milo."}]
    answer = generate(
        server, "stories", "", messages=json.dumps(messages), max_tokens=200, exclude_input_in_output=True
    )
    assert "penguin" in answer.text and "Milo" in answer.text
    # The tokenizer also reads special tokens in a text; this is the template's output as text.
    template = "<|user|>Tell me a story about a penguin named Milo.<|assistant|>"
    plain = generate(server, "stories", template, max_tokens=200, exclude_input_in_output=True)
    assert answer.ids == plain.ids
    assert answer.last.num_input_tokens == plain.last.num_input_tokens


def test_any_character_survives_prompt_and_answer(server):
    prompt = "Zoë 🦊 und 雪 — «ça va?»\n\tO'Neill"
    answer = generate(server, "stories", prompt, max_tokens=5)
    assert answer.text.startswith(prompt)


def test_a_stream_never_shows_half_a_character(server):
    # Forces the first token of a three-byte character, so that some stream must hold it back.
    answer = generate_stream(server, "stories", "雪雪雪雪雪雪雪雪", max_tokens=40, temperature=5.0, seed=1)
    whole = generate(
        server, "stories", "雪雪雪雪雪雪雪雪", max_tokens=40, temperature=5.0, seed=1, exclude_input_in_output=True
    )
    assert answer.text == whole.text
    assert answer.ids == whole.ids


def test_a_model_without_text_takes_and_returns_ids(server):
    answer = generate(server, "synthetic", [1, 2, 3], max_tokens=50)
    assert answer.ids[-50:] == continuation([1, 2, 3], 50)
    assert answer.responses[0].text is None
    streamed = generate_stream(server, "synthetic", [4, 5], max_tokens=50)
    assert streamed.ids == continuation([4, 5], 50)
    assert infer(server, "synthetic_full", [6], max_tokens=50).ids[-50:] == continuation([6], 50)


def test_outputs_can_be_omitted(server):
    off = {"return_finish_reason": False, "return_num_input_tokens": False, "return_num_output_tokens": False}
    response = generate(server, "stories", PROMPT, max_tokens=2, **off).responses[0]
    assert (response.finish_reason, response.num_input_tokens, response.num_output_tokens) == (None, None, None)
    assert response.text is not None


def test_a_request_out_of_time_returns_its_partial_answer(server):
    answer = generate(server, "one_slot", [1], max_tokens=4000, timeout=300_000)
    assert answer.finish_reason == "timed_out"
    produced = answer.last.num_output_tokens
    assert 1 <= produced <= 100
    assert answer.ids[-produced:] == continuation([1], produced)
