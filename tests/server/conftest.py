"""One server of each deployment for all tests that leave it intact, with the models that they use."""

import pytest

from harness import left_out, seeds, tiers
from harness.cancelling import forgiveness
from harness.deployments import DEPLOYMENTS
from harness.front import Front
from harness.libraries import MISBEHAVING, compile_c
from harness.repository import ALLOW_OLDEST, FULL_ANSWER, QUEUED, STORIES, TIGHT
from harness.server import Server, log_states
from harness.synthetic import ENDLESS_SEQ_LEN

BOTH_DRIVERS = ("iterative", "queued")


def pytest_addoption(parser):
    tiers.add_options(parser)


def pytest_generate_tests(metafunc):
    """A test whose server depends on the deployment runs with both drivers, unless its marks say otherwise."""
    if "deployment" in metafunc.fixturenames:
        exactly = metafunc.definition.get_closest_marker("deployments")
        also_on_gpu = metafunc.definition.get_closest_marker("also_on_gpu")
        default = BOTH_DRIVERS + (("gpu",) if also_on_gpu else ())
        names = exactly.args if exactly else default
        metafunc.parametrize("deployment", names, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """The tests of the tier. One deployment after the other, so that each has its server started once."""
    tiers.deselect(config, items)
    order = list(DEPLOYMENTS)

    def position(item):
        return order.index(tiers.deployment_of(item) or order[0])

    items.sort(key=position)


def pytest_sessionfinish(session, exitstatus):
    tiers.end(session, exitstatus)


pytest_runtest_logreport = pytest_collectreport = left_out.logreport
pytest_terminal_summary = seeds.terminal_summary


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Only a test that is marked may cancel streams."""
    forgiveness.may_cancel = item.get_closest_marker("cancelling") is not None
    forgiveness.is_watched = forgiveness.may_cancel or item.get_closest_marker("leaving") is not None
    forgiveness.num_left = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """While a test may cancel streams, or clients leave, Triton logs what becomes of requests."""
    if not forgiveness.is_watched:
        result = yield
        forgiveness.end_test()
        return result
    log_states(True)
    try:
        result = yield
        forgiveness.end_test()
        return result
    finally:
        log_states(False)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that fails because a server of its fixtures has died says so. The next one has a new server."""
    try:
        return (yield)
    except Exception as error:
        servers = [value for value in pyfuncitem.funcargs.values() if isinstance(value, Server) and value.has_ended()]
        if not servers:
            raise
        death = servers[0].death()
        for server in servers:
            server.start()
        raise death from error


@pytest.fixture(scope="session")
def deployment(request):
    """How the models of a test are served."""
    return DEPLOYMENTS[request.param]


@pytest.fixture(scope="session")
def server(tmp_path_factory, deployment):
    add_model, add_synthetic = deployment.add_model, deployment.add_synthetic
    repository = tmp_path_factory.mktemp("server") / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    add_model(repository, "stories_full", fields=FULL_ANSWER, checkpoint=STORIES)
    add_model(repository, "stories_tight", TIGHT, checkpoint=STORIES)
    add_model(repository, "stories_overlap", {"enable_trt_overlap": "true"}, checkpoint=STORIES)
    add_model(
        repository,
        "stories_oldest",
        fields=f"{ALLOW_OLDEST} sequence_batching {{ iterative_sequence: true max_sequence_idle_microseconds: 86400000000 "
        "oldest { max_candidate_sequences: 64 } }",
        checkpoint=STORIES,
    )
    add_model(repository, "stories_queued", fields=QUEUED, checkpoint=STORIES)
    tight_overlap = {**TIGHT, "enable_trt_overlap": "true"}
    add_model(repository, "stories_tight_overlap", tight_overlap, checkpoint=STORIES)
    # Memory for 40 rows of the demo model's 1536 logits.
    few_logits = {"logits_memory_bytes": 40 * 1536 * 4, "max_beam_width": 4}
    add_model(repository, "stories_few_logits", few_logits, checkpoint=STORIES)
    library = compile_c(MISBEHAVING, repository.parent / "processors.so")
    held = {"max_beam_width": 8, "logits_post_processor_library": library}
    add_model(repository, "stories_beams", held, checkpoint=STORIES)
    add_model(repository, "stories_beams_full", {"max_beam_width": 8}, fields=FULL_ANSWER, checkpoint=STORIES)
    overlapping = {"max_beam_width": 8, "enable_trt_overlap": "true"}
    add_model(repository, "stories_beams_overlap", overlapping, checkpoint=STORIES)
    add_model(repository, "stories_beams_tight", {**TIGHT, "max_beam_width": 8}, checkpoint=STORIES)
    add_synthetic(repository, "synthetic_beams", {"max_beam_width": 8})
    add_synthetic(repository, "synthetic")
    add_synthetic(repository, "synthetic_full", fields=FULL_ANSWER)
    add_synthetic(repository, "synthetic_tight", {**TIGHT, "synthetic_step_us": 200})
    endless = {"max_seq_len": ENDLESS_SEQ_LEN}
    add_synthetic(repository, "endless", endless)
    add_synthetic(repository, "one_slot", {**endless, "synthetic_step_us": 5000}, fields="max_batch_size: 1")
    with deployment.server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def front(server):
    """The server with OpenAI's API, in front of the server of the tests in a file."""
    with Front(server) as front:
        yield front


@pytest.fixture
def repository(tmp_path):
    """An empty repository, for a test with its own server."""
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder
