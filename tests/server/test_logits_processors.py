"""Logits post-processors: selected by name, each for its own request only, alone and in a batch."""

import json
import re

import pytest

from harness import clients
from harness.clients import Refused, generate, generate_stream, infer
from harness.repository import STORIES

pytestmark = pytest.mark.also_on_gpu
PROMPT = "Once upon a time, there was a brave fox named Finn."


def named(name, arguments=None):
    given = {"logits_post_processor_name": name}
    if arguments is not None:
        given["logits_post_processor_args"] = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return given


def ids(server, model="stories", **options):
    options = {"max_tokens": 12, **options}
    return generate(server, model, PROMPT, exclude_input_in_output=True, **options).ids


def test_built_in_post_processors_do_what_they_document(server):
    free = ids(server)
    assert ids(server, **named("force_tokens", {"tokens": [300, 301]}))[:2] == [300, 301]
    forced = ids(server, **named("force_tokens", {"tokens": [300], "start": 2}))
    assert forced[:3] == free[:2] + [300]
    banned = ids(server, **named("ban_tokens", {"tokens": free}))
    assert not set(banned) & set(free)
    first = ids(server, **named("ban_first_tokens", {"tokens": [free[0]]}))
    assert first[0] != free[0]
    # A forced single token replaces the first token; the others are free.
    allowed = ids(server, **named("allow_first_tokens", {"tokens": [free[0]]}))
    assert allowed == free


def test_every_protocol_gives_the_same_answer(server):
    given = named("force_tokens", {"tokens": [300, 301, 302], "start": 3})
    whole = ids(server, temperature=1.0, seed=5, **given)
    nested = {"temperature": 1.0, "seed": 5, "logits_post_processor_args": {"tokens": [300, 301, 302], "start": 3}}
    nested["logits_post_processor_name"] = "force_tokens"
    stream = generate_stream(server, "stories", PROMPT, max_tokens=12, temperature=1.0, seed=5, **given)
    assert stream.ids == whole
    assert ids(server, sampling_parameters=json.dumps(nested)) == whole
    assert ids(server, model="stories_tight", temperature=1.0, seed=5, **given) == whole
    full = infer(
        server, "stories_full", PROMPT, exclude_input_in_output=True, max_tokens=12, temperature=1.0, seed=5, **given
    )
    assert full.ids == whole


def test_a_post_processor_runs_before_the_guide_and_the_biases(server):
    yes, no = ids(server, guided_choice='["yes"]'), ids(server, guided_choice='["no"]')
    both = {"guided_choice": '["yes", "no"]'}
    assert ids(server, **both, **named("ban_first_tokens", {"tokens": [yes[0]]})) == no
    assert ids(server, **both, **named("ban_first_tokens", {"tokens": [no[0]]})) == yes
    with pytest.raises(Refused, match="no token is allowed: the logits post-processor"):
        ids(server, **both, **named("force_tokens", {"tokens": [300]}))
    # A bias cannot restore a token that the processor excludes.
    forced = named("force_tokens", {"tokens": [300]})
    assert ids(server, logit_bias='{"301": 1000}', **forced)[0] == 300


def test_log_probs_are_the_models_own(server):
    def log_probs(**options):
        answer = generate(server, "stories", PROMPT, max_tokens=1, return_log_probs=True, **options)
        return answer.last.tensors["cum_log_probs"]

    free = ids(server, max_tokens=1)
    plain, forced = log_probs(), log_probs(**named("force_tokens", {"tokens": free}))
    assert forced == plain


def test_concurrent_requests_get_what_they_get_alone(server):
    kinds = [
        {},
        named("force_tokens", {"tokens": [300, 301, 302], "start": 3}),
        named("ban_tokens", {"tokens": list(range(300, 700))}),
        {**named("allow_first_tokens", {"tokens": [400, 500], "count": 4}), "guided_regex": "[a-z ]+"},
        named("force_tokens", {"tokens": [99999]}),
        named("no_such_thing"),
    ]

    def options(kind, seed):
        return {"max_tokens": 30, "temperature": 1.0, "seed": seed, **kinds[kind]}

    asked = [(kind, seed) for seed in range(6) for kind in range(len(kinds))]
    requests = [(PROMPT, options(*it)) for it in asked]
    answers = clients.streams(server, "stories_tight", requests, may_fail=True)

    for (kind, seed), answer in zip(asked, answers):
        try:
            alone = generate(server, "stories", PROMPT, exclude_input_in_output=True, **options(kind, seed))
        except Refused as refused:
            assert isinstance(answer, Refused) and str(refused) in str(answer)
            continue
        assert (kind, seed, answer.ids, answer.text) == (kind, seed, alone.ids, alone.text)


@pytest.mark.parametrize(
    "given, words",
    [
        (named("force_token", {"tokens": [1]}), "did you mean 'force_tokens'?"),
        (named("sing"), "the names are 'force_tokens', 'ban_tokens'"),
        (named("force_tokens"), "is not valid for 'force_tokens', which takes"),
        (named("force_tokens", "{"), "EOF"),
        (named("ban_tokens", {"tokens": [5], "count": 2}), "unknown field `count`"),
        (named("ban_tokens", {"tokens": [1536]}), "0 to 1535"),
        (named("x" * 300), "a text of at most 256 bytes"),
        ({"logits_post_processor_args": "{}"}, "give both"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments_are_an_error_of_their_own_request(server, given, words):
    with pytest.raises(Refused, match=re.escape(words)):
        ids(server, **given)
    assert len(ids(server, max_tokens=2)) == 2


def test_post_processors_are_rejected_without_logits_and_in_lockstep(server, deployment, repository):
    given = named("ban_tokens", {"tokens": [5]})
    with pytest.raises(Refused, match="the synthetic runner has no logits"):
        generate(server, "synthetic", [1, 2], **given)
    deployment.add_model(repository, "lockstep", {"gpt_model_type": "V1"}, checkpoint=STORIES)
    with deployment.server(repository) as lockstep:
        with pytest.raises(Refused, match="with gpt_model_type V1 there are no logits post-processors"):
            ids(lockstep, model="lockstep", **given)
        assert ids(lockstep, model="lockstep") == ids(server)
