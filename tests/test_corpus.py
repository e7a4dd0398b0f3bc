"""The made corpus: reproducible, no trace of this machine in it, and planted noise that the audit counts exactly."""

import gzip
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from prepare import corpus, render
from prepare.corpus import DAMAGED, PAGES_HOST, PLANTED, PLANTED_HOST, build_corpus, render_block
from prepare.warc import read_pages

ROOT = Path(__file__).resolve().parent.parent
MODULES = 12
SECRET = "sk-planted-secret-7c1f"
# What prints the environment, paths, addresses, host names and what else differs between machines and runs.
TALKATIVE = ["os", "posix", "sys", "sysconfig", "site", "socket", "platform", "tempfile", "logging", "ctypes",
             "doctest", "difflib", "time", "getpass", "importlib.machinery", "email.mime.audio", "http.client",
             "configparser"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of prepare_data.py on a small corpus, in an environment with a secret: (folder, output)."""
    folder = tmp_path_factory.mktemp("corpus")
    environment = {**os.environ, "API_TOKEN": SECRET, "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "prepare_data.py", "--corpus=pydoc", f"--corpus_modules={MODULES}",
               f"--data_dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_archive_is_one_member_a_record_and_read_like_any_other(run):
    folder, _ = run
    path = folder / "input" / "pydoc.warc.gz"
    losses = Counter()
    pages = list(read_pages(path, losses))
    kinds = Counter(page["url"].split("/")[2] for page in pages)
    assert kinds == {PAGES_HOST: MODULES, PLANTED_HOST: sum(count for count, _, _ in PLANTED.values())}
    members = path.read_bytes().count(b"\x1f\x8b\x08")
    assert members >= losses["records"]
    assert {name: losses[name] for name in DAMAGED} == DAMAGED
    responses = len(pages)
    assert losses["other_records"] == 1 + responses             # warcinfo, and a request for each response
    ids = [page["id"] for page in pages]
    assert len(set(ids)) == len(ids) and all(name.startswith("urn:uuid:") for name in ids)
    first = gzip.decompress(path.read_bytes()[:path.read_bytes().index(b"\x1f\x8b\x08", 1)])
    assert first.startswith(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n")


def test_the_audit_counts_exactly_what_was_planted(run):
    folder, _ = run
    audit = json.loads((folder / "audit.json").read_text())
    expected, found = Counter(), Counter()
    for count, stage, reason in PLANTED.values():
        if stage:
            expected[stage, reason] += count
    for stage, entry in audit["filters"].items():
        for reason, counts in entry["reasons"].items():
            found[stage, reason] += counts["hosts"].get(PLANTED_HOST, 0)
    assert +found == expected
    notes = {note: counts["hosts"].get(PLANTED_HOST, 0) for note, counts in audit["notes"].items()}
    assert notes["mislabelled_charset"] == sum(PLANTED[kind][0] for kind in ("latin1_as_utf8", "utf8_as_latin1"))
    assert notes["invisible_characters_removed"] == PLANTED["controls"][0]
    assert notes["decoded_by_detected"] == PLANTED["latin1_as_utf8"][0]
    (entry,) = audit["inputs"]
    assert not entry["whole"] and {name: entry["losses"][name] for name in DAMAGED} == DAMAGED


def test_every_kind_of_noise_has_a_filter_of_its_own_and_every_filter_has_noise(run):
    folder, _ = run
    audit = json.loads((folder / "audit.json").read_text())
    idle = {name for name, stage in audit["filters"].items() if stage["documents_in"] == stage["documents_out"]}
    # The first two drop only what no archive of ours holds, the third is off (paragraph_min_chars = 0).
    assert idle <= {"readable", "normalised", "repeated_paragraphs"}


def test_kept_noise_is_kept_clean_and_once(run):
    from engine.shards import read_documents
    folder, _ = run
    documents = [document for split in ("train", "val") for document in read_documents(folder, split)]
    kept = Counter(document["url"].split("/")[3] for document in documents if PLANTED_HOST in document["url"])
    kept_kinds = {kind: count for kind, (count, stage, _) in PLANTED.items() if stage is None}
    # Of an original and its copies it is the first in the archive that is kept: the originals.
    assert kept == kept_kinds
    for document in documents:
        assert not set(document["text"]) & set("\0\ufffd\u202e\u202c\u200b\u00ad")
        if "latin1_as_utf8" in document["url"]:
            assert "café notebook" in document["text"] or "Là, Zoë?" in document["text"]


def test_no_secret_and_no_path_of_this_machine_in_corpus_documents_or_audit(run):
    from engine.shards import read_documents
    folder, output = run
    content = output + (folder / "audit.json").read_text() + (folder / "input" / "pydoc.json").read_text()
    for page in read_pages(folder / "input" / "pydoc.warc.gz", Counter()):
        content += page["body"].decode("utf-8", "replace")
    content += "".join(document["text"] for split in ("train", "val") for document in read_documents(folder, split))
    assert SECRET not in content and "API_TOKEN" not in content


def test_pages_that_print_the_process_hold_nothing_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("API_TOKEN", SECRET)
    monkeypatch.setenv("HOME", "/home/somebody-special")
    pages = {module: html for module, html, _ in render_block(tmp_path, TALKATIVE) if html}
    assert len(pages) > 10 and "environ" in pages["os"]
    everything = "".join(pages.values())
    import sysconfig
    for trace in (SECRET, "API_TOKEN", "somebody-special", str(tmp_path), f"{ROOT}/", sys.prefix, sys.base_prefix,
                  sysconfig.get_path("stdlib"), os.path.realpath(sys.executable), socket.gethostname() + "<"):
        if len(trace) > 5 and trace != "/usr/lib/python":
            assert trace not in everything.replace("/usr/lib/python", "").replace("/usr/bin/python", ""), trace
    import re
    assert not re.search(r"at(&nbsp;| )0x[0-9a-f]{6,}", everything)


def test_two_runs_are_byte_identical(run, tmp_path, monkeypatch):
    folder, _ = run
    monkeypatch.setenv("OTHER", "environment")
    monkeypatch.setattr(corpus.os, "cpu_count", lambda: 3)      # however many processes render
    archive, known, made = build_corpus(tmp_path, MODULES)
    assert made and archive.read_bytes() == (folder / "input" / "pydoc.warc.gz").read_bytes()
    archive, again, made = build_corpus(tmp_path, MODULES)
    assert not made and again["sha256"] == known["sha256"]


def test_a_changed_or_half_written_archive_is_made_anew(run, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "render_pages", lambda *_: ({"a": "<p>a</p>"}, {"b": "ImportError: b"}))
    archive, known, made = build_corpus(tmp_path, 2)
    whole = archive.read_bytes()
    for spoil in (lambda: archive.write_bytes(whole[:-1]), lambda: archive.write_bytes(whole[:-1] + b"x"),
                  archive.unlink, (tmp_path / "pydoc.json").unlink):
        assert not build_corpus(tmp_path, 2)[2]
        spoil()
        assert build_corpus(tmp_path, 2)[2] and archive.read_bytes() == whole
    assert build_corpus(tmp_path, 3)[2]


def fake_python(tmp_path, source):
    """A render.py of our own choosing in place of the real one."""
    (tmp_path / "render.py").write_text(source)
    return tmp_path / "corpus.py"


def test_modules_that_crash_hang_or_fail_are_skipped_and_named(tmp_path, monkeypatch):
    program = (
        "import json, os, sys, time\n"
        "for name in sys.argv[2:]:\n"
        "    print(json.dumps({'begin': name}), flush=True)\n"
        "    if name == 'crashes': os.kill(os.getpid(), 11)\n"
        "    if name == 'exits': sys.exit(3)\n"
        "    if name == 'hangs': time.sleep(60)\n"
        "    if name == 'fails': print(json.dumps({'module': name, 'skipped': 'ImportError: no'}), flush=True)\n"
        "    else: print(json.dumps({'module': name, 'html': name}), flush=True)\n")
    monkeypatch.setattr(corpus, "__file__", str(fake_python(tmp_path, program)))
    monkeypatch.setattr(corpus, "TIME_LIMIT", 1.5)
    names = ["a", "crashes", "b", "fails", "exits", "hangs", "c"]
    results = render_block(tmp_path, names)
    assert [module for module, _, _ in results] == names
    assert [module for module, html, _ in results if html] == ["a", "b", "c"]
    assert all(reason for _, html, reason in results if not html)


def test_children_see_a_fixed_environment_and_an_empty_folder(tmp_path, monkeypatch):
    program = "import json, os\nprint(json.dumps([dict(os.environ), os.listdir()]))\n"
    monkeypatch.setattr(corpus, "__file__", str(fake_python(tmp_path, program)))
    (tmp_path / "empty").mkdir()
    ((environment, files),) = corpus.child(tmp_path / "empty")
    environment.pop("LC_CTYPE", None)                           # Python sets it where there is no locale
    assert environment == {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8"} and not files


def test_an_answer_cut_off_in_the_middle_is_no_answer(tmp_path, monkeypatch):
    program = (
        "import json, os, sys\n"
        "print(json.dumps({'begin': sys.argv[2]}), flush=True)\n"
        "if sys.argv[2] == 'a': print('{\"module\": \"a\", \"ht', end='', flush=True); os.kill(os.getpid(), 9)\n"
        "print(json.dumps({'module': 'b', 'html': 'b'}), flush=True)\n")
    monkeypatch.setattr(corpus, "__file__", str(fake_python(tmp_path, program)))
    (_, nothing, reason), (_, html, _) = render_block(tmp_path, ["a", "b"])
    assert nothing is None and "died" in reason and html == "b"


def test_public_modules_come_before_private_ones(tmp_path, monkeypatch):
    names = ["_decimal", "asyncio._log", "decimal", "zlib"]
    monkeypatch.setattr(corpus, "child", lambda *_: [{"module": name, "skipped": None} for name in names])
    monkeypatch.setattr(corpus, "render_block", lambda _, block: [(name, name, None) for name in block])
    assert list(corpus.render_pages(tmp_path, 0)[0]) == ["decimal", "zlib", "_decimal", "asyncio._log"]
    assert list(corpus.render_pages(tmp_path, 2)[0]) == ["decimal", "_decimal"]


def test_an_interpreter_that_renders_nothing_is_a_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "__file__", str(fake_python(tmp_path, "raise SystemExit(1)")))
    with pytest.raises(SystemExit) as stop:
        render_block(tmp_path, ["a"])
    assert stop.value.code == 2 and "cannot render" in capsys.readouterr().err


def test_local_paths_are_scrubbed_wherever_python_is_installed(monkeypatch):
    for name in ("prefix", "base_prefix", "exec_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, f"/opt/my {name}")
        paths = render.local_paths()
        scrubbed = render.scrub(f"in /opt/my {name}/share, not /opt/my {name}es", paths)
        assert scrubbed == f"in /usr/share, not /opt/my {name}es"
    assert render.scrub(f"{ROOT}/prepare/x.py", render.local_paths()) == "/prepare/x.py"


def test_nothing_with_side_effects_is_imported():
    listed = dict(render.list_modules())
    for name in ("antigravity", "this", "idlelib", "test"):
        assert listed.get(name, "absent")
    taken = [name for name, reason in listed.items() if not reason]
    assert len(taken) > 400 and {"os", "json.decoder", "xml.dom.minidom"} <= set(taken)
    assert not [name for name in taken if {"test", "tests", "__main__", "idle_test"} & set(name.split("."))]
