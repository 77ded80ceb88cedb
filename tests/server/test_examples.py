"""What the README and the book tell a user to type does what they say."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from harness import clients
from harness.clients import generate
from harness.repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/src").glob("*.md"))]
HTTP, GRPC = "localhost:8000", "localhost:8001"
# Examples of a model that a user would have to make first are not run.
DEMO = f"{HTTP}/v2/models/stories/"


def blocks(language):
    """The fenced blocks of a language, each with its page."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(page, block) for page in PAGES for block in pattern.findall(page.read_text())]


def curl_commands():
    """The arguments of every curl command to the demo model, each with its page."""
    commands = []
    for page, block in blocks("sh"):
        words = shlex.split(block, comments=True)
        starts = [i for i, word in enumerate(words) if word == "curl"]
        for start, end in zip(starts, [*starts[1:], len(words)]):
            if any(word.startswith(DEMO) for word in words[start:end]):
                commands.append((page, words[start + 1 : end]))
    return commands


CURL_COMMANDS = curl_commands()


def test_the_examples_are_found():
    pages = {page.name for page, _ in CURL_COMMANDS}
    assert {"README.md", "quick-start.md", "sequences.md", "guided-decoding.md", "clients.md"} <= pages
    assert {page.name for page, _ in blocks("python")} == {"quick-start.md", "conversations.md", "openai.md", "anthropic.md", "tei.md"}


def test_the_python_example_prints_the_story(server):
    (example,) = (block for page, block in blocks("python") if page.name == "quick-start.md")
    assert GRPC in example
    printed = subprocess.run(
        [sys.executable, "-c", example.replace(GRPC, server.grpc_url)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=clients.TIMEOUT_S,
        check=True,
    ).stdout
    options = {"max_tokens": 60, "stop": '["The end"]', "exclude_input_in_output": True}
    assert printed and printed == generate(server, "stories_full", "Once upon a time", **options).text


@pytest.mark.parametrize(
    "arguments",
    [arguments for _, arguments in CURL_COMMANDS],
    ids=[f"{page.stem}-{i}" for i, (page, _) in enumerate(CURL_COMMANDS)],
)
def test_a_curl_example_is_answered(server, arguments):
    (url,) = (word for word in arguments if word.startswith(HTTP))
    body = arguments[arguments.index("-d") + 1]
    status, answer = server.http("POST", url.removeprefix(HTTP), body)
    assert status == 200, answer
    if url.endswith("/generate_stream"):
        events = [line.removeprefix("data: ") for line in answer.decode().splitlines() if line]
        responses = [json.loads(event) for event in events]
        assert len(responses) > 1
    else:
        responses = [json.loads(answer)]
    reasons = responses[-1]["finish_reason"]
    # Each of several sequences has one.
    assert set(reasons if isinstance(reasons, list) else [reasons]) <= {"length", "end_id"}
    assert any(response["text_output"] for response in responses)


def mpi_job():
    """The book's job for Kubernetes' MPI operator."""
    [text] = [block for _, block in blocks("yaml") if "kind: MPIJob" in block]
    return yaml.safe_load(text)


# Of a job and of its replicas in v2beta1: deploy/v2beta1/mpi-operator.yaml of kubeflow/mpi-operator v0.8.2.
JOB_FIELDS = {
    "launcherCreationPolicy",
    "mpiImplementation",
    "mpiReplicaSpecs",
    "runLauncherAsWorker",
    "runPolicy",
    "slotsPerWorker",
    "sshAuthMountPath",
}
REPLICA_FIELDS = {"replicas", "restartPolicy", "template"}


def test_the_job_for_kubernetes_is_one_that_its_operator_takes():
    job = mpi_job()
    assert job["apiVersion"] == "kubeflow.org/v2beta1"
    spec = job["spec"]
    assert set(spec) <= JOB_FIELDS
    replicas = spec["mpiReplicaSpecs"]
    assert set(replicas) == {"Launcher", "Worker"}
    for replica in replicas.values():
        assert set(replica) <= REPLICA_FIELDS
        pod = replica["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        [container] = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    [launcher] = replicas["Launcher"]["template"]["spec"]["containers"]
    # The operator has a worker run an SSH server if it says nothing else.
    [worker] = replicas["Worker"]["template"]["spec"]["containers"]
    assert "command" not in worker and "args" not in worker
    words = [*launcher["command"], *launcher["args"]]
    num_processes = sum(int(number) for option, number in zip(words, words[1:]) if option == "-n")
    num_hosts = replicas["Launcher"]["replicas"] * spec["runLauncherAsWorker"] + replicas["Worker"]["replicas"]
    assert num_processes == num_hosts * spec["slotsPerWorker"]
