"""TLS of the server with OpenAI's API: towards its clients, and towards tritonserver."""

import http.client
import json
import ssl
import subprocess

import pytest

from harness.front import Front
from harness.repository import STORIES, add_model
from harness.server import Server

FIELDS = {"model": "stories", "prompt": "Once upon a time", "max_tokens": 5}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A certificate of this machine, and its key."""
    return new_pair(tmp_path_factory.mktemp("tls"))


def new_pair(folder):
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -out {certificate} -keyout {key}"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def server(tmp_path_factory, pair):
    """A tritonserver whose gRPC is encrypted."""
    certificate, key = pair
    repository = tmp_path_factory.mktemp("openai_tls") / "repository"
    add_model(repository, "stories", checkpoint=STORIES)
    encrypted = ["--grpc-use-ssl=1", f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}"]
    with Server(repository, *encrypted) as server:
        yield server


def test_requests_are_encrypted_on_both_ways(server, pair):
    certificate, key = pair
    tls = [f"--tls-certificate={certificate}", f"--tls-key={key}", f"--triton-ca={certificate}"]
    with Front(server, *tls) as front:
        assert front.url.startswith("https://")
        connection = http.client.HTTPSConnection(front.address, context=ssl.create_default_context(cafile=certificate))
        connection.request("POST", "/v1/completions", json.dumps(FIELDS))
        response = connection.getresponse()
        assert response.status == 200 and json.loads(response.read())["usage"]["completion_tokens"] == 5
        connection.close()
        plain = http.client.HTTPConnection(front.address)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            plain.request("GET", "/health")
            plain.getresponse()


def test_a_certificate_is_read_again_when_the_front_is_told_so(server, pair, tmp_path):
    (tmp_path / "first").mkdir()
    certificate, key = new_pair(tmp_path / "first")
    first = certificate.read_bytes()

    def shown():
        return ssl.get_server_certificate(tuple(front.address.split(":"))).encode()

    with open(tmp_path / "log", "w") as file, open(tmp_path / "log") as log:
        tls = [f"--tls-certificate={certificate}", f"--tls-key={key}", f"--triton-ca={pair[0]}"]
        with Front(server, *tls, log=file) as front:
            assert shown().strip() == first.strip()
            certificate.write_bytes(pair[0].read_bytes())
            # A certificate with the key of another one.
            said = front.reload(log)
            assert shown().strip() == first.strip()
            key.write_bytes(pair[1].read_bytes())
            front.reload(log)
            assert shown().strip() == pair[0].read_bytes().strip()
    assert "stay" in said


def test_another_server_behind_the_front_is_not_trusted(server, pair, tmp_path):
    other = tmp_path / "other.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=other -out {other} -keyout {tmp_path / 'key'}"
    subprocess.run(command.split(), check=True, capture_output=True)
    for arguments in ([f"--triton-ca={other}"], []):
        with Front(server, *arguments) as front:
            answer = front.call("POST", "/v1/completions", FIELDS)
            assert answer.status == 503 and "no connection to tritonserver" in answer.json["error"]["message"]


@pytest.mark.parametrize("which, words", [("key", "certificate"), ("certificate", "key"), ("both", "nowhere.pem")])
def test_files_that_are_none_are_named(server, pair, tmp_path, which, words, capfd):
    certificate, key = pair
    files = {"key": (key, key), "certificate": (certificate, certificate), "both": (tmp_path / "nowhere.pem", key)}
    certificate, key = files[which]
    with pytest.raises(AssertionError, match="exit status 1"):
        Front(server, f"--tls-certificate={certificate}", f"--tls-key={key}")
    assert words in capfd.readouterr().err
