"""prepare_data.py as a whole: formats in, documents and shards out; reruns, kills, changed inputs, clear errors."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard

import prepare_data
from archives import html, http, members, prose, record, response
from configurator import configure
from engine.shards import TokenData, read_documents
from engine.tokenizer import PATTERNS, SPECIAL_TOKENS, Tokenizer
from prepare import audit, clean, filters, workers

ROOT = Path(__file__).resolve().parent.parent


def call(*arguments):
    # In this process, unless a test asks for others: those do not know what it has patched.
    prepare_data.main(configure(vars(prepare_data), ["--workers=0", *arguments]))


def run(folder, inputs, *arguments):
    call(f"--data_dir={folder}", f"--inputs={inputs}", *arguments)


def documents(folder):
    return [document for split in ("train", "val") for document in read_documents(folder, split)]


def prepare_data_place(url):
    return clean.place({"url": url, "text": "x"}, {"val_pinned": (), "val_by": "page"})


def texts(folder):
    return {document["url"]: document["text"] for document in documents(folder)}


def results(folder):
    """The bytes of everything that a run leaves, except the lock."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*"))
            if path.is_file() and path.name not in (".lock", "decisions.npz")}


def save_tokenizer(folder, extra=()):
    ranks = [bytes([byte]) for byte in range(256)] + list(extra)
    tokenizer = Tokenizer(ranks, PATTERNS["gpt4"], {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)})
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    (folder / "tokenizer").mkdir(parents=True)
    return tokenizer


@pytest.fixture
def byte_tokenizer(monkeypatch):
    """Puts a tokenizer of bytes (and `extra` tokens) into a data folder, without depending on its file format."""
    made = {}

    def put(folder, *extra):
        made["tokenizer"] = save_tokenizer(folder, extra)
        (folder / "tokenizer" / "tokenizer.json").write_text("{}")
        return made["tokenizer"]

    monkeypatch.setattr(prepare_data.Tokenizer, "load", classmethod(lambda cls, path: made["tokenizer"]))
    return put


def archive(path, names, host="http://a.example/"):
    pages = [response(html(prose(name).replace(". ", ".</p><p>")), f"{host}{name}") for name in names]
    path.write_bytes(members(pages))
    return path


SETTINGS = {"max_replacement": 0.01, "min_chars": 200, "max_chars": 1_000_000, "language_threshold": 0.995,
            "min_entropy": 3.2, "min_ascii": 0.3}
NAMES = ("alder", "birch", "cedar", "dogwood", "elder", "fir", "ginkgo", "hazel", "ironwood", "juniper",
         "larch", "maple")


@pytest.fixture
def inputs(tmp_path):
    """A folder of three inputs: an archive, JSON lines and a text file."""
    folder = tmp_path / "in"
    folder.mkdir()
    archive(folder / "a.warc.gz", NAMES[:8])
    lines = [{"text": prose(name), "url": f"http://b.example/{name}"} for name in NAMES[8:11]]
    lines += [{"text": prose("alder"), "url": "http://b.example/copy"}, {"text": None}]
    (folder / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "c.txt").write_text(prose(NAMES[11]))
    return folder


# --------------------------------------------------------------------------------------------------------------------
# Documents and audit

def test_all_formats_become_documents(tmp_path, inputs, capsys):
    run(tmp_path / "d", inputs)
    found = documents(tmp_path / "d")
    assert len(found) == 12          # the copy of alder has other line ends than the archive's: a near-duplicate
    one = next(document for document in found if document["url"] == "http://a.example/birch")
    assert set(one) == {"id", "url", "text", "length", "date", "language", "language_score", "source", "split"}
    assert one["length"] == len(one["text"]) and one["language"] == "en" and one["source"] == "a.warc.gz"
    assert one["text"].startswith("The committee met on Tuesday")
    audit = json.loads((tmp_path / "d" / "audit.json").read_text())
    assert audit["filters"]["readable"]["reasons"]["json_no_text"]["documents"] == 1
    assert [entry["file"] for entry in audit["inputs"]] == ["a.warc.gz", "b.jsonl", "c.txt"]
    output = capsys.readouterr().out
    assert "json_no_text 1" in output and "train_tokenizer.py" in output and "prepare_data.py" in output


def test_the_waterfall_adds_up(tmp_path, inputs):
    run(tmp_path / "d", inputs, "--rules=gopher_quality", "--minhash_threshold=0.5", "--paragraph_min_chars=40")
    audit = json.loads((tmp_path / "d" / "audit.json").read_text())
    stages = list(audit["filters"].values())
    assert list(audit["filters"])[-4:] == ["gopher_quality", "exact_duplicate", "near_duplicate", "repeated_paragraphs"]
    for before, after in zip(stages, stages[1:]):
        assert before["documents_out"] == after["documents_in"] and before["bytes_out"] == after["bytes_in"]
    for stage in stages:
        reasons = stage["reasons"].values()
        assert stage["documents_in"] - stage["documents_out"] == sum(counts["documents"] for counts in reasons)
        for counts in reasons:
            assert counts["documents"] == sum(counts["hosts"].values()) and 0 < len(counts["examples"]) <= 5
    kept = documents(tmp_path / "d")
    assert stages[-1]["documents_out"] == len(kept) == sum(entry["documents"] for entry in audit["documents"])
    assert stages[-1]["bytes_out"] == sum(len(document["text"].encode()) for document in kept)
    judged = audit["filters"]["language"]["documents_in"]
    assert sum(audit["histograms"]["language_score"]["counts"]) == judged
    assert audit["histograms"]["language_score"]["threshold"] == {"language_threshold": 0.995}


def test_audits_add_up_in_any_order_and_rare_hosts_are_summed():
    def audit_of(numbers):
        made = audit.empty_audit(["f"], SETTINGS)
        for number in numbers:                                              # hosts 0 to 29 twice, 30 to 59 once
            page = {"url": f"http://user@H{number % 60}.example:80/{number}", "text": "t"}
            audit.judge(made["filters"]["f"], page, "reason", 10, 0)
            audit.tally(made["notes"], "note", page, 3)
            audit.measure(made, {"language_score": 1.0, "characters": 0, "entropy": 99.0})
        return made

    parts = [audit_of(range(40)), audit_of(range(40, 42)), audit_of(range(42, 90))]
    for order in (parts, parts[::-1]):
        whole = audit.empty_audit(["f"], SETTINGS)
        for part in order:
            audit.add(whole, part)
        assert whole == audit_of(range(90))
    done = audit.finished(whole)
    hosts = done["filters"]["f"]["reasons"]["reason"]["hosts"]
    assert len(done["filters"]["f"]["reasons"]["reason"]["examples"]) == 5
    assert len(hosts) == 51 and hosts["h7.example"] == 2 and hosts["other"] == 10 and sum(hosts.values()) == 90
    assert done["histograms"]["entropy"]["counts"][-1] == done["histograms"]["characters"]["counts"][0] == 90


def test_r30_d28_duplicates_over_all_files(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, pages in (("x", ("alder", "birch")), ("y", ("alder", "cedar")), ("z", ("alder", "birch", "dogwood"))):
        archive(folder / f"{name}.warc.gz", pages, f"http://{name}.example/")
    for threshold in (0.85, 0):                                  # 0: exact duplicates only
        run(tmp_path / "d", folder, f"--minhash_threshold={threshold}")
        assert sorted(texts(tmp_path / "d")) == ["http://x.example/alder", "http://x.example/birch",
                                                 "http://y.example/cedar", "http://z.example/dogwood"]
        reasons = json.loads((tmp_path / "d" / "audit.json").read_text())["filters"]["exact_duplicate"]["reasons"]
        assert reasons["exact_duplicate"]["hosts"] == {"z.example": 2, "y.example": 1}


def test_repeated_paragraphs_are_left_out_over_all_files_and_on_both_sides_of_the_split(tmp_path):
    """A licence at the foot of every page stays on one; a page with nothing of its own goes."""
    licence = "This page may be copied by anyone who also copies this paragraph, which says so."
    last = "At its end the page has a word to say about {0}{0}{0}, and about {0} once more.".format
    pages = [[prose(name), f"Short {name}.", licence, last(name)] for name in "abcdefghijklmnopqrstuvwxyz"]
    pages.append([pages[3][0], licence, "Nothing new.", pages[7][3]])
    for half, lines in enumerate((pages[:13], pages[13:])):
        (tmp_path / f"{half}.jsonl").write_text("".join(json.dumps(
            {"text": "\n\n".join(page), "url": f"http://{half}.example/{n}"}) + "\n" for n, page in enumerate(lines)))
    options = ("--minhash_threshold=0", "--val_fraction=0.3", "--languages=()", "--language_threshold=0")
    run(tmp_path / "d", tmp_path / "*.jsonl", *options)
    assert sum(licence in document["text"] for document in documents(tmp_path / "d")) == 27      # off unless asked for
    for workers in (1, 2):
        run(tmp_path / "d", tmp_path / "*.jsonl", *options, "--paragraph_min_chars=40", f"--workers={workers}")
        kept = documents(tmp_path / "d")
        found = texts(tmp_path / "d")
        assert len(kept) == 26 and {document["split"] for document in kept} == {"train", "val"}
        assert found["http://0.example/0"] == "\n\n".join(pages[0])
        assert found["http://1.example/0"] == "\n\n".join(part for part in pages[13] if part != licence)
        assert all(document["length"] == len(document["text"]) for document in kept)
        stage = json.loads((tmp_path / "d" / "audit.json").read_text())["filters"]["repeated_paragraphs"]
        assert stage["reasons"]["repeated_paragraphs"]["documents"] == 1
        assert stage["reasons"]["repeated_paragraphs"]["examples"][0]["detail"] == "characters_left=12"


def test_d9_real_common_crawl_files(tmp_path, shared_data, capsys):
    folder = shared_data / "warc"
    names = [folder / name for name in ("whirlwind.warc.gz", "whirlwind.warc.wet.gz", "whirlwind.warc.wat.gz",
                                        "CC-MAIN-2024-22.warc.paths.gz")]
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "d", ",".join(map(str, names)))
    streams = capsys.readouterr()
    assert stop.value.code == 2 and "'language'" in streams.err and "not_a_warc" in streams.out
    run(tmp_path / "e", ",".join(map(str, names)), "--languages=()", "--language_threshold=0", "--minhash_threshold=0")
    assert len(documents(tmp_path / "e")) == 2
    run(tmp_path / "f", f"{folder}/*.warc*,{folder}/ccnet*", "--val_fraction=0.2")
    assert len(documents(tmp_path / "f")) > 25


# --------------------------------------------------------------------------------------------------------------------
# The split

def many(path, count, host="http://a.example/"):
    names = ["".join(random.Random(n).choices("abcdefghijklmnopqrstuvwxyz", k=7)) for n in range(count)]
    lines = [{"text": prose(name), "url": f"{host}{name}"} for name in names]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [line["url"] for line in lines]


def test_the_split_is_by_page_and_stays_when_pages_come_and_go(tmp_path):
    urls = many(tmp_path / "a.jsonl", 120)
    run(tmp_path / "d", tmp_path / "a.jsonl", "--val_fraction=0.2")
    before = {document["url"]: document["split"] for document in documents(tmp_path / "d")}
    assert 10 < sum(split == "val" for split in before.values()) < 40
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(reversed(lines[30:])))
    many(tmp_path / "b.jsonl", 40, "http://b.example/")
    # A second version of a page, and one with a fragment, lie on the page's own side.
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": prose("new" + url[-7:]), "url": url + "#part"}) + "\n"
                                              for url in urls[:40]))
    run(tmp_path / "d", tmp_path / "*.jsonl", "--val_fraction=0.2")
    after = {}
    for document in documents(tmp_path / "d"):
        page = document["url"].partition("#")[0]
        assert after.setdefault(page, document["split"]) == document["split"]
    assert all(after[url] == split for url, split in before.items() if url in after)
    assert all((split == "val") == (prepare_data_place(url) < 0.2) for url, split in (before | after).items())
    assert len(set(after) & set(before)) > 80
    assert sum("#" in document["url"] for document in documents(tmp_path / "d")) == 40


def test_more_is_held_out_by_a_larger_fraction_and_pinned_pages_always(tmp_path):
    urls = many(tmp_path / "a.jsonl", 80)
    held = []
    for fraction in (0.1, 0.3, 0.6):
        run(tmp_path / "d", tmp_path / "a.jsonl", f"--val_fraction={fraction}")
        held.append({document["url"] for document in read_documents(tmp_path / "d", "val")})
    assert held[0] < held[1] < held[2]
    free = sorted(set(urls) - held[2])
    run(tmp_path / "d", tmp_path / "a.jsonl", "--val_fraction=0.1", f"--val_pinned={free[0]},*{free[1][-5:]}")
    assert {document["url"] for document in read_documents(tmp_path / "d", "val")} == held[0] | set(free[:2])
    run(tmp_path / "d", tmp_path / "a.jsonl", "--val_fraction=0", f"--val_pinned={free[0]}")
    assert [document["url"] for document in read_documents(tmp_path / "d", "val")] == free[:1]


def test_few_pages_still_give_one_held_out_and_none_only_on_demand(tmp_path):
    many(tmp_path / "a.jsonl", 3)
    run(tmp_path / "d", tmp_path / "a.jsonl", "--val_fraction=0.000001")
    assert len(list(read_documents(tmp_path / "d", "val"))) == 1
    run(tmp_path / "d", tmp_path / "a.jsonl", "--val_fraction=0")
    assert len(list(read_documents(tmp_path / "d", "val"))) == 0
    # The page that is lowest of all is a copy, which is not there.
    urls = sorted((f"http://a.example/{n}" for n in range(20)), key=lambda url: prepare_data_place(url))
    lines = [{"text": prose(name), "url": url} for name, url in (("fir", urls[9]), ("fir", urls[0]), ("elder", urls[5]))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(tmp_path / "d", tmp_path / "a.jsonl", "--val_fraction=0.000001")
    assert [document["url"] for document in read_documents(tmp_path / "d", "val")] == [urls[5]]


def test_a_full_file_of_documents_is_followed_by_another(tmp_path, monkeypatch):
    urls = many(tmp_path / "a.jsonl", 10)
    monkeypatch.setattr(prepare_data, "DOCS_PER_FILE", 4)
    run(tmp_path / "d", tmp_path / "a.jsonl", "--val_fraction=0")
    entries = json.loads((tmp_path / "d" / "audit.json").read_text())["documents"]
    assert [entry["file"] for entry in entries] == [f"docs/train_0000{number}.jsonl.zst" for number in range(3)]
    assert [entry["documents"] for entry in entries] == [4, 4, 2]
    assert [document["url"] for document in documents(tmp_path / "d")] == urls


# --------------------------------------------------------------------------------------------------------------------
# Shards

def test_shards_are_bos_text_eos_and_markers_in_text_stay_text(tmp_path, byte_tokenizer):
    lines = [{"text": prose("alder") + "<|endoftext|> <|bos|><|eos|> <|end|>", "url": "http://a.example/1"},
             {"text": prose("birch"), "url": "http://a.example/2"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = byte_tokenizer(tmp_path / "d")
    run(tmp_path / "d", tmp_path / "a.jsonl", "--shard_tokens=500")
    seen = 0
    for split in ("train", "val"):
        data = TokenData(tmp_path / "d" / "tokens", split, tokenizer.hash)
        for number, document in enumerate(read_documents(tmp_path / "d", split)):
            first, last = int(data.offsets[number]), int(data.offsets[number + 1])
            ids = data.read(first, last - first).tolist()
            assert ids == [tokenizer.bos_id, *document["text"].encode(), tokenizer.eos_id]
            seen += 1
        assert data.index["splits"][split]["text_bytes"] == data.n_tokens - 2 * data.n_docs
        assert all(file["tokens"] <= 500 for file in data.index["splits"][split]["files"])
    assert seen == 2
    assert data.index["config_hash"] and data.index["source_hash"] and data.index["dtype"] == "uint16"


def test_r28_a_large_vocabulary_gives_uint32(tmp_path, inputs, byte_tokenizer):
    extra = sorted({f"{a}{b}{c}{d}".encode() for a in "abcdefghij" for b in "klmnopqrst"
                    for c in "uvwxyzabcdefghijklmno" for d in "abcdefghijklmnopqrstuvwxyzABCDEFGHI"})
    tokenizer = byte_tokenizer(tmp_path / "d", *extra)
    assert tokenizer.bos_id > 70_000
    run(tmp_path / "d", inputs)
    data = TokenData(tmp_path / "d" / "tokens", "train")
    assert data.index["dtype"] == "uint32" and data.read(0, 1)[0] == tokenizer.bos_id


def test_another_tokenizer_makes_other_shards(tmp_path, inputs, byte_tokenizer, capsys):
    first = byte_tokenizer(tmp_path / "d")
    run(tmp_path / "d", inputs)
    second = byte_tokenizer(tmp_path / "d", b"th", b"the")
    assert first.hash != second.hash
    with pytest.raises(SystemExit):
        TokenData(tmp_path / "d" / "tokens", "train", second.hash)
    run(tmp_path / "d", inputs)
    assert TokenData(tmp_path / "d" / "tokens", "train", second.hash).n_docs
    capsys.readouterr()
    run(tmp_path / "d", inputs)
    assert "tokens: done before and unchanged" in capsys.readouterr().out


def test_what_is_replaced_and_by_what_it_differs_is_said(tmp_path, inputs, byte_tokenizer, capsys):
    tokenizer = byte_tokenizer(tmp_path / "d")
    run(tmp_path / "d", inputs)
    assert "made before" not in (said := capsys.readouterr().out) and "other documents" not in said
    audit = json.loads((tmp_path / "d" / "audit.json").read_text())
    files = [[Path(entry["file"]).name, entry["sha256"]] for entry in audit["documents"] if entry["split"] == "train"]
    report = tmp_path / "d" / "tokenizer" / "report.json"
    report.write_text(json.dumps({"made_from": {"files": files}, "hash": tokenizer.hash}))
    run(tmp_path / "d", inputs)
    assert "other documents" not in capsys.readouterr().out
    (inputs / "c.txt").unlink()
    run(tmp_path / "d", inputs, "--min_chars=210")
    said = capsys.readouterr().out
    assert "documents: made before with min_chars = 200, now 210\n" in said and "1 input files no longer read, " in said
    assert "this tokenizer was learned from other documents" in said and "train_tokenizer.py" in said


def test_stale_and_damaged_shard_files_do_not_survive(tmp_path, inputs, byte_tokenizer):
    byte_tokenizer(tmp_path / "d")
    run(tmp_path / "d", inputs, "--shard_tokens=100")
    many_files = len(list((tmp_path / "d" / "tokens").glob("*.bin")))
    run(tmp_path / "d", inputs)
    whole = results(tmp_path / "d")
    assert len(list((tmp_path / "d" / "tokens").glob("*.bin"))) == 4 < many_files
    for name in ("tokens/train_00000.bin", "tokens/val_offsets.bin", "docs/train_00000.jsonl.zst", "tokens/index.json"):
        path = tmp_path / "d" / name
        if path.suffix == ".json":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1] + b"~")
        run(tmp_path / "d", inputs)
        assert results(tmp_path / "d") == whole, name


@pytest.mark.parametrize("name, key, value", [
    ("audit.json", "documents", 5), ("audit.json", "documents", [5]), ("audit.json", "inputs", None),
    ("audit.json", "inputs", {"a": 5}), ("audit.json", "settings", []), ("tokens/index.json", "splits", 5),
    ("tokens/index.json", "splits", {"a": 5}), ("tokens/index.json", "vocab_size", None)])
def test_records_of_another_form_are_made_anew_and_named(tmp_path, inputs, byte_tokenizer, capsys, name, key, value):
    folder = tmp_path / "d"
    byte_tokenizer(folder)
    run(folder, inputs)
    whole, good = results(folder), json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**good, key: value}))
    if name == "audit.json":
        run(folder, inputs, "--explain=http://a.example/alder")
        assert "has not been finished" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit) as stop:
            run(folder, inputs, f"--inspect={folder}")
        said = capsys.readouterr().err
        assert stop.value.code == 2 and "index.json" in said and ("damaged" in said or key in said)
    run(folder, inputs)
    assert results(folder) == whole


def test_what_others_keep_in_the_data_folder_is_left_alone(tmp_path, inputs, byte_tokenizer, monkeypatch):
    """Say the data folder is somebody's home, with a folder "work" of his own in it."""
    names = ("work/thesis.txt", "docs/letter.txt", "docs/a.jsonl.zst", "tokens/notes", "letters/a.tmp")
    theirs = [tmp_path / "d" / name for name in names]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    byte_tokenizer(tmp_path / "d")
    run(tmp_path / "d", inputs)
    run(tmp_path / "d", inputs, "--min_chars=210")
    monkeypatch.setattr(workers, "clean_file", lambda *_: open(tmp_path / "no" / "such"))
    with pytest.raises(SystemExit):
        run(tmp_path / "d", inputs, "--min_chars=211")
    assert [path.read_text() for path in theirs] == ["precious"] * 5


@pytest.mark.parametrize("step, change", [("write_index", "--shard_tokens=50"),
                                          ("write_documents", "--val_fraction=0.5")])
def test_while_one_is_rewritten_no_reader_takes_the_old(tmp_path, inputs, byte_tokenizer, monkeypatch, step, change):
    """A stop in the middle of rewriting leaves no audit and no index that would vouch for what lies there."""
    def stop(*_, **__):
        raise KeyboardInterrupt
    byte_tokenizer(tmp_path / "d")
    run(tmp_path / "d", inputs)
    monkeypatch.setattr(prepare_data, step, stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "d", inputs, change)
    with pytest.raises(SystemExit):
        TokenData(tmp_path / "d" / "tokens", "train") if step == "write_index" else documents(tmp_path / "d")
    assert not (tmp_path / "d" / ("tokens/index.json" if step == "write_index" else "audit.json")).exists()


def test_an_input_that_is_half_cleaned_does_not_count_as_cleaned(tmp_path, inputs, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(clean, "write_json", stop)
        run(tmp_path / "d", inputs)
    assert not list((tmp_path / "d" / "work").glob("*.json"))
    run(tmp_path / "d", inputs)
    assert len(documents(tmp_path / "d")) == 12


@pytest.mark.parametrize("end", clean.CLEANED)
def test_a_cleaned_file_that_is_gone_is_made_again(tmp_path, inputs, end):
    run(tmp_path / "d", inputs)
    for path in (tmp_path / "d" / "work").glob(f"*{end}"):
        path.unlink()
    run(tmp_path / "d", inputs, "--val_fraction=0.5")
    assert len(documents(tmp_path / "d")) == 12


def test_cleaned_files_that_are_damaged_are_named(tmp_path, inputs, capsys):
    run(tmp_path / "d", inputs)
    for end, fraction in ((".rows", 0.4), (".jsonl.zst", 0.5), (".shingles", 0.3)):
        path = sorted((tmp_path / "d" / "work").glob(f"*{end}"))[0]
        whole = path.read_bytes()
        # One bit of a text, in a file that can be read to its end and has all of its lines.
        flipped = zstandard.compress(zstandard.ZstdDecompressor().decompressobj().decompress(whole).replace(
            b"committee", b"cmmmittee", 1)) if end == ".jsonl.zst" else whole[:9] + bytes([whole[9] ^ 1]) + whole[10:]
        for content in (whole[:50], b"", b"something else", flipped):
            path.write_bytes(content)
            with pytest.raises(SystemExit) as stop:
                run(tmp_path / "d", inputs, f"--val_fraction={fraction}")
            said = capsys.readouterr().err
            assert stop.value.code == 2 and path.name in said and "delete it" in said, (end, content)
        path.unlink()
        run(tmp_path / "d", inputs, f"--val_fraction={fraction}")
        assert len(documents(tmp_path / "d")) == 12


def test_results_in_the_folder_of_inputs_are_no_inputs(tmp_path, inputs, byte_tokenizer, capsys):
    run(inputs, inputs)
    before = results(inputs)
    run(inputs, inputs)
    assert results(inputs) == before and "documents: done before and unchanged" in capsys.readouterr().out
    byte_tokenizer(inputs)
    run(inputs, inputs)
    assert len(documents(inputs)) == 12 and (inputs / "tokens" / "index.json").exists()


def test_inputs_where_results_go_are_refused_and_left_alone(tmp_path, capsys):
    mine = tmp_path / "d" / "docs" / "mine.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text(json.dumps({"text": prose("alder")}))
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "d", tmp_path / "d" / "docs")
    assert stop.value.code == 2 and "choose another --data_dir" in capsys.readouterr().err and mine.exists()


def test_every_change_to_the_program_counts(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "prepare", tmp_path / "prepare")
    shutil.copy(ROOT / "prepare_data.py", tmp_path)
    monkeypatch.setattr(prepare_data, "__file__", str(tmp_path / "prepare_data.py"))
    seen = {prepare_data.program_hash()}
    for name in ("prepare_data.py", "prepare/text.py", "prepare/warc.py"):
        with open(tmp_path / name, "a") as file:
            file.write("# changed\n")
        seen.add(prepare_data.program_hash())
    monkeypatch.setattr(prepare_data.importlib.metadata, "version", lambda name: "next")
    assert len(seen | {prepare_data.program_hash()}) == 5


def test_a_tokenizer_without_eos_is_refused(tmp_path, inputs, byte_tokenizer, capsys):
    byte_tokenizer(tmp_path / "d").eos_id = None
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "d", inputs)
    assert stop.value.code == 2 and "no EOS" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------------
# Again, otherwise, and after a kill

def test_d32_reruns_redo_exactly_what_changed(tmp_path, inputs, capsys, monkeypatch):
    cleaned = []
    original = workers.clean_file
    monkeypatch.setattr(workers, "clean_file", lambda path, *rest: (cleaned.append(Path(path).name),
                                                                          original(path, *rest)))

    def again(*arguments):
        cleaned.clear()
        run(tmp_path / "d", inputs, *arguments)
        return sorted(cleaned), "documents: done before" in capsys.readouterr().out

    everything = ["a.warc.gz", "b.jsonl", "c.txt"]
    assert again() == (everything, False)
    whole = results(tmp_path / "d")
    assert again() == ([], True) and results(tmp_path / "d") == whole
    assert again("--min_chars=210") == (everything, False)                  # a filter's threshold
    assert again("--min_chars=210", "--val_fraction=0.3") == ([], False)    # only what comes after cleaning
    (inputs / "c.txt").write_text(prose("oak"))                             # one edited input, of the same size or not
    assert again("--min_chars=210", "--val_fraction=0.3") == (["c.txt"], False)
    os.utime(inputs / "a.warc.gz", (0, 0))                                  # touched, not edited
    assert again("--min_chars=210", "--val_fraction=0.3") == ([], True)
    (inputs / "c.txt").write_text(prose(NAMES[11]))
    assert again() == (everything, False) and results(tmp_path / "d") == whole
    monkeypatch.setattr(prepare_data, "program_hash", lambda: "changed code")
    assert again() == (everything, False)


def test_d32_the_number_of_workers_changes_nothing(tmp_path, inputs):
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    for workers in (1, 2):
        command = [sys.executable, "prepare_data.py", f"--data_dir={tmp_path / str(workers)}", f"--inputs={inputs}",
                   f"--workers={workers}"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert results(tmp_path / "1") == results(tmp_path / "2")


@pytest.mark.parametrize("rounds", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_d31_killed_at_any_moment_the_next_call_gives_the_same_bytes(tmp_path, rounds):
    """kill -9 at random times, each time going on in the same folder with what the last one left."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(4):
        many(folder / f"{number}.jsonl", 25, f"http://{number}.example/")
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import test_prepare_data as t, prepare_data\nfrom pathlib import Path\n"
        "made = t.save_tokenizer(Path(sys.argv[1]))\n"
        "(Path(sys.argv[1]) / 'tokenizer/tokenizer.json').write_text('{}')\n"
        "prepare_data.Tokenizer.load = classmethod(lambda cls, path: made)\n"
        "print('begin', flush=True)\n"
        "t.run(sys.argv[1], sys.argv[2], '--shard_tokens=9000')\n")
    command = [sys.executable, str(script), str(tmp_path / "d"), str(folder)]

    def start(target):
        command[2] = str(target)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
        process.stdout.readline()
        return process

    begun = time.perf_counter()
    assert start(tmp_path / "whole").communicate() and (tmp_path / "whole" / "tokens" / "index.json").exists()
    duration = time.perf_counter() - begun
    draw, survived = random.Random(4), 0
    for _ in range(rounds):
        process = start(tmp_path / "d")
        time.sleep(draw.uniform(0, duration * 1.1))
        process.send_signal(signal.SIGKILL)
        survived += process.wait() == 0
        if draw.random() < 0.3:
            shutil.rmtree(tmp_path / "d")                     # begin at the beginning now and then
    start(tmp_path / "d").communicate()
    assert results(tmp_path / "d") == results(tmp_path / "whole")
    assert not list((tmp_path / "d").rglob("*.tmp"))


# --------------------------------------------------------------------------------------------------------------------
# Bad input

def refused(capsys, *words, arguments):
    with pytest.raises(SystemExit) as stop:
        call(*map(str, arguments))
    message = capsys.readouterr().err
    assert stop.value.code == 2
    for word in words:
        assert word in message, message


def test_inputs_that_do_not_exist(tmp_path, capsys):
    refused(capsys, "nothing to read", "--corpus=pydoc", arguments=[f"--data_dir={tmp_path}"])
    refused(capsys, "'no/*.gz' matches no file", "'nor.this'",
            arguments=[f"--data_dir={tmp_path}", "--inputs=no/*.gz,nor.this"])
    (tmp_path / "empty").mkdir()
    refused(capsys, "matches no file", arguments=[f"--data_dir={tmp_path}", f"--inputs={tmp_path / 'empty'}"])
    (tmp_path / "empty" / "page.txt").write_text("text")
    (tmp_path / "empty" / "gone.txt").symlink_to(tmp_path / "elsewhere")
    refused(capsys, "gone.txt is a link to nothing", arguments=[f"--data_dir={tmp_path}", f"--inputs={tmp_path / 'empty'}"])


def test_all_wrong_settings_are_named_at_once(tmp_path, capsys, inputs):
    refused(capsys, "no rule set 'gofer'", "gopher_quality", "corpus must be", "val_fraction", "workers", "minhash_seed",
            "min_chars is above max_chars", "100,000,000 hash functions", arguments=[f"--data_dir={tmp_path / 'd'}", f"--inputs={inputs}", "--rules=gofer", "--corpus=web",
                       "--val_fraction=1.5", "--workers=-1", "--minhash_seed=-1", "--max_chars=99",
                       "--minhash_bands=100000", "--minhash_rows=1000"])
    assert not (tmp_path / "d").exists()


def test_an_empty_result_names_the_filter(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "short"}) + "\n")
    for _ in range(2):                                                       # a second call does not call it done
        refused(capsys, "of 1 documents none is left", "'length'", "too_short 1",
                arguments=[f"--data_dir={tmp_path / 'd'}", f"--inputs={tmp_path / 'a.jsonl'}"])
    assert "short" in (tmp_path / "d" / "audit.json").read_text()
    (tmp_path / "a.jsonl").write_text("")
    refused(capsys, "no documents at all",
            arguments=[f"--data_dir={tmp_path / 'd'}", f"--inputs={tmp_path / 'a.jsonl'}"])


def test_an_unreadable_input(tmp_path, capsys, inputs, monkeypatch):
    def unreadable(path):
        if Path(path).name == "b.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return "0"
    monkeypatch.setattr(prepare_data, "sha256_file", unreadable)
    refused(capsys, "b.jsonl", "Permission denied", arguments=[f"--data_dir={tmp_path / 'd'}", f"--inputs={inputs}"])


def test_a_file_with_several_names_is_read_once_and_a_closed_folder_is_named(tmp_path, inputs, capsys, monkeypatch):
    (inputs / "deeper").mkdir()
    (inputs / "deeper" / "again").symlink_to(inputs)                  # a loop, of which glob goes round forty times
    (inputs / "z.jsonl").symlink_to(inputs / "b.jsonl")
    paths = prepare_data.check(configure(vars(prepare_data), [f"--inputs={inputs},{tmp_path}/in/../in/*.txt"]))
    assert sorted(path.name for path in paths) == ["a.warc.gz", "b.jsonl", "c.txt"]
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "deeper" and real(path, mode))
    refused(capsys, "the folder", "deeper", arguments=(f"--data_dir={tmp_path / 'd'}", f"--inputs={inputs}"))


def test_a_folder_that_may_not_be_written_to(tmp_path, capsys, inputs):
    (tmp_path / "file").write_text("in the way")
    refused(capsys, "cannot write", arguments=[f"--data_dir={tmp_path / 'file' / 'd'}", f"--inputs={inputs}"])


def test_two_at_once(tmp_path, capsys, inputs):
    from engine.files import lock_folder
    with lock_folder(tmp_path / "d"):
        refused(capsys, "in use", arguments=[f"--data_dir={tmp_path / 'd'}", f"--inputs={inputs}"])


def test_a_full_disk_is_one_sentence_and_costs_nothing(tmp_path, byte_tokenizer):
    """The limit on file size stands in for the full disk: writes fail in the middle with an OSError."""
    many(tmp_path / "a.jsonl", 30)
    run(tmp_path / "d", tmp_path / "a.jsonl")
    before = results(tmp_path / "d")
    many(tmp_path / "a.jsonl", 60)
    command = [sys.executable, "prepare_data.py", f"--data_dir={tmp_path / 'd'}", f"--inputs={tmp_path / 'a.jsonl'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)))
    assert done.returncode == 2, done.stderr
    assert "cannot go on" in done.stderr and "run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    after = results(tmp_path / "d")
    assert {name: after[name] for name in before if not name.startswith("work/")} == \
        {name: before[name] for name in before if not name.startswith("work/")}
    assert not list((tmp_path / "d").rglob("*.tmp"))
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert len(documents(tmp_path / "d")) == 60


def test_r29_a_filter_that_raises_names_the_page_and_the_file(tmp_path, inputs, monkeypatch):
    def broken(page, settings):
        raise KeyError("a bug of ours")
    monkeypatch.setitem(filters.FILTERS, "ascii_share", broken)
    with pytest.raises(KeyError) as error:
        run(tmp_path / "d", inputs)
    (note,) = error.value.__notes__
    assert "http://a.example/alder" in note and "a.warc.gz" in note


def test_a_damaged_input_is_reported_and_the_rest_is_used(tmp_path, inputs, capsys):
    whole = (inputs / "a.warc.gz").read_bytes()
    (inputs / "a.warc.gz").write_bytes(whole[:len(whole) * 2 // 3])
    run(tmp_path / "d", inputs)
    assert "a.warc.gz was not read whole: " in capsys.readouterr().out
    (entry, *_) = json.loads((tmp_path / "d" / "audit.json").read_text())["inputs"]
    assert not entry["whole"] and entry["losses"]["truncated"] == 1
    assert len(documents(tmp_path / "d")) > 6


def test_hostile_urls_and_ids_do_not_stop_anything_nor_move_a_terminal(tmp_path, capsys):
    urls = ["http://[::bad/", "http://\ud800.example/", "", "javascript:x", "http://a.example/" + "x" * 100_000,
            "http://e.example/\x1b[31m\u202e"]
    lines = [json.dumps({"text": prose(name), "url": url, "id": url}) for name, url in zip(NAMES, urls)]
    lines += [json.dumps({"text": "short", "url": url}) for url in urls]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    run(tmp_path / "d", tmp_path / "a.jsonl")
    assert len(documents(tmp_path / "d")) == len(urls)
    capsys.readouterr()
    run(tmp_path / "d", tmp_path / "a.jsonl", f"--explain={urls[-1]}")
    said = capsys.readouterr().out
    assert said.startswith("http://e.example/ in a.jsonl, ") and "  kept\n" in said
    for text in (said, (tmp_path / "d" / "audit.html").read_text()):
        assert "e.example/" in text and "\x1b" not in text and "\u202e" not in text
    assert np.isfinite([prepare_data_place(url) for url in ("", "a")]).all()


def test_a_file_name_that_is_not_utf8(tmp_path, capsys):
    for name, word in ((b"a\xff.txt", "alder"), (b"b\xff.jsonl", "birch")):
        text = prose(word) if name.endswith(b"txt") else json.dumps({"text": prose(word)})
        try:
            (tmp_path / os.fsdecode(name)).write_text(text)
        except OSError:
            pytest.skip("this file system takes UTF-8 names only")
    run(tmp_path / "d", f"{tmp_path}/*.*")
    assert {document["source"] for document in documents(tmp_path / "d")} == {"a\ufffd.txt", "b\ufffd.jsonl"}
    capsys.readouterr()
    run(tmp_path / "d", f"{tmp_path}/*.*", "--explain=b\ufffd.jsonl:1")
    assert capsys.readouterr().out.startswith("b\ufffd.jsonl:1 in b\ufffd.jsonl, ")
    with pytest.raises(SystemExit):
        run(tmp_path / "d", f"{tmp_path}/*.*", "--explain=b\ufffd.jsonl:2")
    assert "in the 2 input files (a\ufffd.txt, b\ufffd.jsonl). A page without" in capsys.readouterr().err
