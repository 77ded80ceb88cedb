"""`/metrics` of the server with OpenAI's API: its counters, and tritonserver's metrics under vLLM's names."""

import re

import pytest

from harness import clients
from harness.front import Front
from harness.repository import STORIES, add_model
from harness.server import Server, until

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')
OF_MODEL = 'model_name="stories",version="1"'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("openai_metrics") / "repository"
    add_model(repository, "stories", {"max_tokens_in_paged_kv_cache": 1024}, checkpoint=STORIES)
    with Server(repository, "--metrics-interval-ms=100") as server:
        yield server


def samples(front):
    """The values by name and labels. No sample may be there twice, and none without its type."""
    with front.request("GET", "/metrics") as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = response.read().decode()
    values, types = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name = line.split()[2]
            assert name not in types, name
            types.add(name)
        elif line and not line.startswith("#"):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            assert {name, re.sub("_(bucket|sum|count)$", "", name)} & types, line
            assert (name, labels) not in values, line
            values[name, labels] = float(value)
    return values


def test_requests_are_counted_by_path_and_status(server):
    with Front(server) as front:
        for _ in range(2):
            front.post("/v1/completions", model="stories", prompt="A", max_tokens=2)
        front.stream("/v1/completions", model="stories", prompt="A", max_tokens=2)
        assert front.call("POST", "/v1/chat/completions", {"model": "stories"}).status == 400
        assert front.call("GET", "/v1/models/none").status == 404
        for number in range(3):
            assert front.call("GET", f"/path{number}").status == 404
        found = samples(front)
    name = "inflight_openai_requests_total"
    expected = {
        'path="/v1/completions",status="200"': 3,
        'path="/v1/chat/completions",status="400"': 1,
        'path="/v1/models/{*name}",status="404"': 1,
        'path="other",status="404"': 3,
    }
    assert {labels: value for (found_name, labels), value in found.items() if found_name == name} == expected
    assert found["inflight_openai_prompts_in_flight", None] == 0
    assert not [name for name, _ in found if name.startswith(("vllm", "nv_", "inflight_openai_triton"))]


def test_the_metrics_of_models_have_the_names_of_vllm_too(server):
    with Front(server, f"--triton-metrics=127.0.0.1:{server.metrics_port}") as front:
        before = samples(front)
        usage = front.post("/v1/completions", model="stories", prompt="Once upon a time", max_tokens=9)["usage"]

        num_before = before["vllm:generation_tokens_total", OF_MODEL]

        async def are_counted():
            await until(lambda: samples(front)["vllm:generation_tokens_total", OF_MODEL] >= num_before + 9)

        clients.run(are_counted())
        found = samples(front)

    def grown(name, labels=OF_MODEL):
        return found[name, labels] - before[name, labels]

    assert grown("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert (grown("vllm:generation_tokens_total"), grown("vllm:request_success_total")) == (9, 1)
    assert (found["vllm:num_requests_running", OF_MODEL], found["vllm:num_requests_waiting", OF_MODEL]) == (0, 0)
    assert 0 <= found["vllm:kv_cache_usage_perc", OF_MODEL] <= 1
    assert found["vllm:cache_config_info", f'{OF_MODEL},block_size="32",num_gpu_blocks="32"'] == 1
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert grown(f"vllm:{name}_count") == grown(f"vllm:{name}_bucket", f'{OF_MODEL},le="+Inf"') == 1
        assert grown(f"vllm:{name}_sum") > 0
    assert found["inflight_openai_triton_metrics_up", None] == 1
    assert [name for name, _ in found if name == "nv_inference_request_success"]
    with Front(server, "--triton-metrics=127.0.0.1:1") as front:
        assert samples(front)["inflight_openai_triton_metrics_up", None] == 0
