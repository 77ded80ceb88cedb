"""One server for all tests that leave it intact, with the models that they use."""

import pytest

from harness.libraries import MISBEHAVING, compile_c
from harness.repository import FULL_ANSWER, QUEUED, STORIES, TIGHT, add_model, add_synthetic
from harness.server import Server
from harness.synthetic import ENDLESS_SEQ_LEN


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("server") / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    add_model(repository, "stories_full", fields=FULL_ANSWER, checkpoint=STORIES)
    add_model(repository, "stories_tight", TIGHT, checkpoint=STORIES)
    add_model(repository, "stories_overlap", {"enable_trt_overlap": "true"}, checkpoint=STORIES)
    add_model(
        repository,
        "stories_oldest",
        fields="sequence_batching { iterative_sequence: true max_sequence_idle_microseconds: 86400000000 "
        "oldest { max_candidate_sequences: 64 } }",
        checkpoint=STORIES,
    )
    add_model(repository, "stories_queued", fields=QUEUED, checkpoint=STORIES)
    tight = {**TIGHT, "enable_trt_overlap": "true"}
    add_model(repository, "stories_queued_tight", tight, fields=QUEUED, checkpoint=STORIES)
    # Memory for 40 rows of the demo model's 1536 logits.
    few_logits = {"logits_memory_bytes": 40 * 1536 * 4, "max_beam_width": 4}
    add_model(repository, "stories_few_logits", few_logits, checkpoint=STORIES)
    library = compile_c(MISBEHAVING, repository.parent / "processors.so")
    held = {"max_beam_width": 8, "logits_post_processor_library": library}
    add_model(repository, "stories_beams", held, checkpoint=STORIES)
    add_model(repository, "stories_beams_full", {"max_beam_width": 8}, fields=FULL_ANSWER, checkpoint=STORIES)
    add_model(repository, "stories_beams_queued", {"max_beam_width": 8}, fields=QUEUED, checkpoint=STORIES)
    overlapping = {"max_beam_width": 8, "enable_trt_overlap": "true"}
    add_model(repository, "stories_beams_overlap", overlapping, checkpoint=STORIES)
    add_model(repository, "stories_beams_tight", {**TIGHT, "max_beam_width": 8}, checkpoint=STORIES)
    add_synthetic(repository, "synthetic_beams", {"max_beam_width": 8})
    add_synthetic(repository, "synthetic")
    add_synthetic(repository, "synthetic_queued", fields=QUEUED)
    add_synthetic(repository, "synthetic_full", fields=FULL_ANSWER)
    add_synthetic(repository, "synthetic_tight", {**TIGHT, "synthetic_step_us": 200})
    endless = {"max_seq_len": ENDLESS_SEQ_LEN}
    add_synthetic(repository, "endless", endless)
    add_synthetic(repository, "one_slot", {**endless, "synthetic_step_us": 5000}, fields="max_batch_size: 1")
    with Server(repository, "--model-control-mode=explicit", "--load-model=*") as server:
        yield server


@pytest.fixture
def repository(tmp_path):
    """An empty repository, for a test with its own server."""
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder
