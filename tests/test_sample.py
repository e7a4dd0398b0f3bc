"""sample.py: greedy twice, all three ways of asking, prompts beyond the context, harmless output, clear refusals."""
import io
import json
import sys

import pytest
import torch

import sample
from configurator import configure
from engine.chat import read_conversations, render
from engine.generate import TextStream, generate
from engine.hf import load_model, save_model
from small import byte_tokenizer, small_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of random weights, wide enough apart that no two tokens are about equally likely."""
    folder = tmp_path_factory.mktemp("model")
    model = small_llama(seed=4, block_size=48)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    save_model(folder, model, byte_tokenizer())
    return folder


@pytest.fixture
def ask(folder, capsys):
    """ask(--key=value, ...) -> (standard output, standard error) of sample.py in this process."""
    def call(*words):
        given = [f"--model={folder}", "--device=cpu", "--dtype=fp32", "--threads=1"]
        sample.main(configure(vars(sample), [*given, *words]))
        captured = capsys.readouterr()
        return captured.out, captured.err
    return call


def greedy(folder, ids, n):
    model, tokenizer = load_model(folder)
    return tokenizer.decode(generate(model, [ids], n, {tokenizer.eos_id, tokenizer.special("<|end|>")}, 0).ids[0])


def test_temperature_zero_is_greedy_and_the_same_twice(ask, folder):
    _, tokenizer = load_model(folder)
    words = "--prompt=hello", "--temperature=0", "--max_new_tokens=12"
    first, second = ask(*words)[0], ask(*words, "--seed=2", "--top_k=3")[0]
    expected = "hello" + greedy(folder, [tokenizer.bos_id, *tokenizer.encode("hello")], 12)
    assert first == second == sample.printable(expected) + "\n"


def test_top_k_larger_than_the_vocabulary_and_seeds(ask):
    words = "--prompt=hello", "--temperature=3.0", "--max_new_tokens=12"
    everything = ask(*words, "--top_k=0")[0]
    assert ask(*words, "--top_k=100000")[0] == everything == ask(*words, "--top_k=0")[0]
    assert ask(*words, "--top_k=0", "--seed=2")[0] != everything
    assert ask(*words, "--top_k=1")[0] == ask(*words, "--temperature=0")[0]
    assert ask(*words, "--top_p=0.0000001")[0] == ask(*words, "--temperature=0")[0]


def test_the_furthest_stage_with_a_checkpoint_speaks(tmp_path):
    config = configure(vars(sample), [f"--out_dir={tmp_path}"])
    (tmp_path / "ppo" / "step_00000001.tmp").mkdir(parents=True)     # begun, and killed in its first checkpoint
    for stage in ("pretrain", "sft", "ppo"):
        (tmp_path / stage / "step_00000001").mkdir(parents=True)
        assert sample.find_model(config) == tmp_path / stage


def test_nothing_to_begin_with_is_bos_alone(ask):
    assert len(ask("--max_new_tokens=5")[0]) > 1


def test_a_file_of_messages_prompts_and_lines(ask, folder, tmp_path):
    _, tokenizer = load_model(folder)
    question = [{"role": "user", "content": "Why?"}]
    entries = [{"messages": question, "kind": "k"}, {"prompt": "hello"}, {"prompt": "a much longer one"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    words = f"--file={path}", "--temperature=0", "--max_new_tokens=10"
    found = [json.loads(line) for line in ask(*words, "--batch_size=2")[0].splitlines()]
    for entry, line in zip(entries, found, strict=True):
        ids = (render(tokenizer, question, open_assistant=True)[0] if "messages" in entry
               else [tokenizer.bos_id, *tokenizer.encode(entry["prompt"])])
        assert {key: line[key] for key in entry} == entry and line["cut"] is False
        assert line["completion"] == greedy(folder, ids, 10) and line["tokens"] <= 10
        assert line["stopped"] or line["tokens"] == 10
    path.write_text('{"prompt": "hello"}\n' * 2)
    one, two = ask(f"--file={path}", "--temperature=3.0", "--batch_size=1")[0].splitlines()
    assert one != two               # each batch draws from a seed of its own


def test_a_conversation_keeps_what_was_said(ask, folder, monkeypatch):
    _, tokenizer = load_model(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n\na\n"))
    out, err = ask("--chat=True", "--temperature=0", "--max_new_tokens=6")
    messages = [{"role": "user", "content": "a"}]
    first = greedy(folder, render(tokenizer, messages, open_assistant=True)[0], 6)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "b"}]
    second = greedy(folder, render(tokenizer, messages, open_assistant=True)[0], 6)
    said = [part.split("\n\nyou> ")[0] for part in out.split("model> ")[1:]]
    assert said == [sample.printable(first), sample.printable(second), sample.printable(first)]
    assert "a new conversation" in err and out.endswith("you> \n")
    words = "--chat=True", "--prompt=a", "--temperature=0", "--max_new_tokens=6"
    assert ask(*words)[0] == said[0] + "\n"
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}]
    expected = greedy(folder, render(tokenizer, messages, open_assistant=True)[0], 6)
    assert ask(*words, "--system=S")[0] == sample.printable(expected) + "\n"


def test_commands_of_a_conversation(ask, folder, monkeypatch, tmp_path):
    """/reset forgets, /save appends what read_conversations reads, and what is no command is a question."""
    said = []
    monkeypatch.setattr(sample.Speaker, "speak", lambda self, ids, cut: said.append(ids) or f"answer {len(said)}")
    path = tmp_path / "said.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}')   # no line's end
    def talk(*lines, words=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        return ask("--chat=True", "--max_new_tokens=2", *words)[1]
    err = talk("one", "two", f"/save {path}", "/reset", f"/save {path}", "/etc/hosts?", "/save", f"/save {path}",
               f"/save {tmp_path}/none/x", words=["--system=S"])
    user = lambda text, number: [{"role": "user", "content": text}, {"role": "assistant", "content": f"answer {number}"}]
    system = [{"role": "system", "content": "S"}]
    assert [entry["messages"] for entry in read_conversations(path)][1:] == [
        system + user("one", 1) + user("two", 2), system + user("/etc/hosts?", 3)]
    _, tokenizer = load_model(folder)
    assert said[1] == render(tokenizer, [*system, *user("one", 1), {"role": "user", "content": "two"}], open_assistant=True)[0]
    assert said[2] == render(tokenizer, [*system, {"role": "user", "content": "/etc/hosts?"}], open_assistant=True)[0]
    assert err.count("answers added to") == 2 and err.count("not saved") == 2 and "needs the name" in err
    assert "a new conversation" in err and "No such file" in err
    assert len(path.read_text().splitlines()) == 3


def test_stop_strings_and_penalty_reach_the_model(ask):
    words = "--prompt=hello", "--temperature=0", "--max_new_tokens=30"
    free = ask(*words)[0][len("hello"):-1]
    stop = next(free[i:i + 2] for i in range(6, 20) if free.find(free[i:i + 2]) == i
                and free[i:i + 2].isascii() and free[i:i + 2].isprintable())
    out, err = ask(*words, f"--stop=('never', {stop!r})")
    assert out == "hello" + free[:free.find(stop)] + "\n" and "ended by" not in err
    assert ask(*words, "--repetition_penalty=0.01")[0] != "hello" + free + "\n"


def test_a_file_tells_how_far_it_is(ask, tmp_path, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n' * 5)
    out, err = ask(f"--file={path}", "--batch_size=2", "--max_new_tokens=4")
    assert len(out.splitlines()) == 5 and "[5 of 5 prompts," in err and "[2 of 5" not in err
    monkeypatch.setattr(sample, "SAY_EVERY", -1)
    assert "[2 of 5 prompts," in ask(f"--file={path}", "--batch_size=2", "--max_new_tokens=4")[1]


def test_ctrl_c_in_an_answer_ends_the_conversation(ask, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    monkeypatch.setattr(sample, "generate", interrupted)
    assert ask("--chat=True")[0] == "\nyou> model> \n"


def test_a_prompt_beyond_the_context_loses_its_beginning_and_that_is_said(ask, folder):
    model, tokenizer = load_model(folder)
    speaker = sample.Speaker(configure(vars(sample), ["--max_new_tokens=10"]), model, tokenizer)
    text = "0123456789" * 10
    ids, cut = speaker.text_prompt(text)
    assert cut and ids == [tokenizer.bos_id, *tokenizer.encode(text[-37:])] and len(ids) + 10 == 48
    assert speaker.text_prompt(text[:37]) == ([tokenizer.bos_id, *tokenizer.encode(text[:37])], False)
    assert speaker.text_prompt(text[:38])[1]
    long = sample.Speaker(configure(vars(sample), ["--max_new_tokens=1000"]), model, tokenizer)
    assert long.text_prompt(text) == ([tokenizer.bos_id, *tokenizer.encode(text[-23:])], True)     # half of the context
    assert "its beginning was left out" in ask(f"--prompt={text}", "--max_new_tokens=10")[1]
    _, err = ask("--prompt=abc", "--temperature=0", "--max_new_tokens=1000")     # a stop would be said otherwise
    assert "the context's end" in err or "max_new_tokens" not in err


def test_a_conversation_beyond_the_context_loses_its_oldest_turns(folder):
    model, tokenizer = load_model(folder)
    speaker = sample.Speaker(configure(vars(sample), ["--max_new_tokens=10"]), model, tokenizer)
    def message(role, content):
        return {"role": role, "content": content}
    system, old, newer, last = (message("system", "S" * 5), [message("user", "1" * 9), message("assistant", "2" * 9)],
                                [message("user", "3" * 6), message("assistant", "4" * 5)], message("user", "5" * 5))
    assert speaker.chat_prompt([system, *newer, last]) == (speaker.render([system, *newer, last]), False)
    assert speaker.chat_prompt([system, *old, *newer, last]) == (speaker.render([system, *newer, last]), True)
    short = [message("user", "1" * 5), message("assistant", "2" * 5)]           # too long by one: both go, or none
    assert speaker.chat_prompt([system, *short, *newer, last]) == (speaker.render([system, *newer, last]), True)
    ids, cut = speaker.chat_prompt([system, *old, message("user", "x" * 50 + "end?")])
    assert cut and len(ids) + 10 <= 48 and tokenizer.decode(ids).endswith("xend?") and ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids).startswith("SSSSS")
    for count in (30, 31):                                      # where a cut falls inside a character of two bytes
        ids, cut = speaker.chat_prompt([message("user", "é" * count + "x" * (count % 2))])
        assert cut and len(ids) + 10 <= 48 and "\ufffd" not in tokenizer.decode(ids)


def test_nothing_that_a_terminal_would_obey_is_printed(ask, folder, monkeypatch):
    _, tokenizer = load_model(folder)
    escape = tokenizer.encode("\x1b]0;owned\x07\x1b[2Jfine café")     # and two tokens that are one letter

    def wicked(*args, on_text, **kwargs):
        text = TextStream(tokenizer)
        for id in escape:
            on_text(0, text.feed(id))
        return sample_result
    sample_result = generate(load_model(folder)[0], [[1]], 1, set(), tokenizer=tokenizer)
    monkeypatch.setattr(sample, "generate", wicked)
    out, _ = ask("--prompt=\x1b[31mred")
    assert "\x1b" not in out and "\x07" not in out and out.startswith("red") and "fine café" in out


def test_wrong_settings_are_named_together(folder, capsys, tmp_path):
    def refused(*words):
        with pytest.raises(SystemExit) as stop:
            sample.main(configure(vars(sample), [f"--model={folder}", "--device=cpu", *words]))
        assert stop.value.code == 2
        return capsys.readouterr().err
    said = refused("--temperature=1e-300", "--top_p=0", "--top_k=-1", "--max_new_tokens=0", "--file=a", "--prompt=b",
                   "--repetition_penalty=1e-300", "--stop=('',)")
    for part in ("temperature must", "top_p must", "top_k must", "max_new_tokens must", "--file and", "penalty must", "stop must"):
        assert part in said
    assert "--chat=True" in refused("--system=s")
    assert "cannot be read" in refused("--file=none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "a"}\n{"messages": []}\n')
    said = refused(f"--file={tmp_path / 'bad.jsonl'}")
    assert "line 2" in said and "line 3" in said
    assert "no checkpoint" in refused("--model=", f"--out_dir={tmp_path}")


def test_what_is_no_utf8_on_the_way_in_or_out_stops_nothing(ask, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    assert "model>" in ask("--chat=True", "--max_new_tokens=2")[0]
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    ask("--prompt=h\xe9", "--max_new_tokens=2")
    terminal.flush()
    assert terminal.buffer.getvalue().startswith(b"h?")


def test_a_model_with_more_rows_than_its_tokenizer_has_tokens(ask, tmp_path):
    save_model(tmp_path, small_llama(vocab_size=4000), byte_tokenizer())
    out, said = ask(f"--model={tmp_path}", "--prompt=a", "--temperature=9.0", "--top_k=0", "--max_new_tokens=20")
    assert out.startswith("a") and "max_new_tokens" in said
