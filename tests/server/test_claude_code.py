"""Claude Code, a coding agent, as it comes from npm, against the server with Anthropic's API.

Between the two, a proxy adds a guide to each request, so that the demo model calls a tool, and then answers."""

import contextlib
import http.client
import http.server
import json
import os
import subprocess
import threading

import pytest

from harness.conversations import add_calling_model
from harness.front import Front
from harness.server import Server

pytestmark = pytest.mark.complete

ANSWER = "It rains."
TIMEOUT_S = 120


@pytest.fixture
def program():
    program = os.environ.get("CLAUDE_CODE")
    if program is None:
        pytest.skip("no Claude Code")
    return program


@contextlib.contextmanager
def forcing(front, reply_to):
    """The address of a proxy to the front, and the bodies of the requests for messages, as they come. `reply_to`
    returns the reply to a body."""
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path.partition("?")[0] == "/v1/messages":
                bodies.append(body)
                body["guided_choice"] = [reply_to(body)]
            connection = http.client.HTTPConnection(front.address, timeout=TIMEOUT_S)
            connection.request("POST", self.path, json.dumps(body), {"x-api-key": self.headers["x-api-key"]})
            response = connection.getresponse()
            self.send_response(response.status)
            self.send_header("content-type", response.headers["content-type"])
            self.end_headers()
            while data := response.read1():
                self.wfile.write(data)
            connection.close()

        def log_message(self, *_):
            pass

    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}", bodies
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def add_model(repository):
    """Adds the model that calls. Its template has the beginning of each message only, as its context is short, and
    refuses a message of the system behind others, as the templates of Qwen 3.5 do."""
    add_calling_model(repository, "chat")
    path = repository / "chat" / "1" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    template = config["chat_template"]
    each = "{% for message in messages %}"
    refuse = "{% if message.role == 'system' and not loop.first %}{{ raise_exception('a late system message') }}{% endif %}"
    content = "(message.content or '')"
    assert each in template and content in template
    config["chat_template"] = template.replace(each, each + refuse).replace(content, content + "[:200]")
    path.write_text(json.dumps(config))


def test_an_agent_reads_a_file_and_answers(program, repository, tmp_path):
    add_model(repository)
    work = tmp_path / "work"
    work.mkdir()
    (work / "weather.txt").write_text("rain in Oslo\n")
    arguments = json.dumps({"file_path": str(work / "weather.txt")})
    call = f'<tool_call>\n{{"name": "Read", "arguments": {arguments}}}\n</tool_call>'
    # A guide with the marks of a thought is for the whole reply.
    reply_to = lambda body: f"<think>\nA file?\n</think>\n\n{ANSWER if 'tool_result' in json.dumps(body) else call}"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "ANTHROPIC_API_KEY": "sk-one",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = [program, "--print", "What is the weather?", "--model", "chat", "--output-format", "json"]
    with Server(repository) as server, Front(server) as front, forcing(front, reply_to) as (url, bodies):
        environment["ANTHROPIC_BASE_URL"] = url
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["is_error"], result["result"].strip()) == (False, ANSWER), result
    _, last = bodies
    assert last["stream"] and len(last["tools"]) > 5
    (assistant,) = (message for message in last["messages"] if message["role"] == "assistant")
    assert [block["type"] for block in assistant["content"]] == ["thinking", "tool_use"]
    assert "rain in Oslo" in json.dumps(last["messages"][-1])
