"""Claims about tiny/base.py: the tokenizer loses nothing, the questions are honest, and a run can be
repeated."""
import random
import re
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import a11y
import world_model
from data import parse_action
from policy import SYSTEM
from tiny import base

models = settings.get_profile("models")
PIECES = st.sampled_from(base.phrases()) | st.text(alphabet="aZ09 '[]\t\n", max_size=5)


# ---- the tokenizer -----------------------------------------------------------------------------------------

@given(st.text() | st.lists(PIECES, max_size=10).map("".join))
@example("a" * 500)
@example("\u2028\U0001f600é\x00\x85")
@settings(models, max_examples=300)
def test_every_text_reads_back_from_its_tokens(tokenizer, text):
    """Guards: a page that is another page after decoding (unknown tokens, cleaned-up spaces, long words)."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not any(token in text for token in base.TURN):
        assert tokenizer.decode(ids) == text and tokenizer.pad_token_id not in ids


@given(st.integers(0, 10**9))
@settings(models, max_examples=50)
def test_a_string_is_the_same_tokens_wherever_it_stands(tokenizer, seed):
    """Guards what copying rests on: goal, page and answer spell a name alike."""
    name = base.random_name(random.Random(seed), False, words=(1,))

    def spell(text: str) -> str:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return "\x00".join(tokenizer.convert_ids_to_tokens(ids))

    around = [("[3] button '", "', clickable, visible"), ("type [5] [", "] [0]"), ('"', '"'),
              ("asked '", "' did '")]
    for before, after in around:
        assert spell(name) in spell(before + name + after), (before, after)


def test_ids_roles_and_headers_are_one_token_each(tokenizer):
    """Guards: ids of several tokens (a look-up in two hops), a template whose fixed words cost what the page
    should."""
    texts = [str(n) for n in range(10, 400)] + [f"] {role} '" for role in base.ROLES]
    texts += ["\n\t[", ", checked='true'", "OBSERVATION:\n", "\nOBJECTIVE: ", "COMPLETED: YES",
              "COMPLETED: NO", "\nover: yes", "click ["]
    for text in texts:
        assert len(tokenizer(text, add_special_tokens=False).input_ids) == 1, text


def test_the_template_leaves_the_system_message_out_and_marks_each_turn(tokenizer):
    """Guards: hundreds of tokens of instructions before every page of the laptop's recipe."""
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert shown == "<|user|>u<|end|><|assistant|>a<|end|><|user|>v<|end|><|assistant|>"


# ---- the questions -----------------------------------------------------------------------------------------

def page_of(turns) -> str:
    return turns[0][1].partition("\nURL: ")[0].removeprefix("OBSERVATION:\n")


def strings_of(turns) -> set[str]:
    """All names and values of the page, what is typed, and what stands in quotes in questions and answers."""
    nodes = a11y.parse(page_of(turns))
    found = {node.name for node in nodes[1:] if node.name}  # the first is the title
    found |= {a11y.unquote(node.attributes["value"]) for node in nodes if "value" in node.attributes}
    asked = turns[0][1] + str([question for _, question, _ in turns])
    found |= set(re.findall(r"type \[\d+\] \[([^\]]*)\]", asked))
    for _, question, answer in turns:
        found |= set(re.findall(r"'([^']+)'", question.partition("QUESTION: ")[2] or question))
        found |= set(re.findall(r"(?:asked|did) '([^']+)'", answer))
    return found - {"true", "false", "menu"}


@pytest.mark.parametrize("test", [False, True])
def test_what_is_held_out_is_in_no_training_document_and_a_test_asks_for_nothing_else(test):
    """Guards the skills that tiny/README.md reports: strings that were trained on, measured as unseen."""
    rng, seen = random.Random(3), 0
    for _ in range(150):
        strings = strings_of(base.document(rng, test=test))
        seen += len(strings)
        wrong = [text for text in strings if base.held_out(text) != test]
        assert not wrong, wrong
    assert seen > 1000


def check_an_option(page: str, after: str, action, before_focused: set[str]) -> None:
    """A click on an option chooses it alone among its combobox's options. The combobox takes value and
    focus."""
    was, now, node = a11y.parse(page), a11y.parse(after), a11y.find(page, action.bid)
    chosen = was.index(node)
    first = max(k for k in range(chosen) if was[k].role == "combobox")
    end = next((k for k in range(first + 2, len(was)) if was[k].role != "option"), len(was))
    assert [node.bid for node in now[1:] if "focused" in node.attributes] == [was[first].bid]
    assert a11y.unquote(now[first].attributes["value"]) == node.name
    selected = [k for k in range(first, end) if now[k].attributes.get("selected") == "True"]
    assert selected == [chosen]
    changed = {new.bid for old, new in zip(was, now, strict=True) if old != new}
    assert changed <= {node.bid for node in was[first:end]} | before_focused


def check_another(page: str, after: str, action, before_focused: set[str]) -> None:
    """Whatever else is clicked or typed into takes the focus, and nothing but its own state changes."""
    was, now = a11y.parse(page), a11y.parse(after)
    node, new = a11y.find(page, action.bid), a11y.find(after, action.bid)
    assert [node.bid for node in now[1:] if "focused" in node.attributes] == [action.bid]
    assert {b.bid for a, b in zip(was, now, strict=True) if a != b} <= {action.bid} | before_focused
    if action.name == "type":
        assert a11y.unquote(new.attributes["value"]) == action.text
    elif node.role in ("checkbox", "radio"):
        checks = node.role == "radio" or node.attributes["checked"] == "'false'"
        assert new.attributes["checked"] == ("'true'" if checks else "'false'")
    else:
        assert new.attributes.get("value") == node.attributes.get("value")


def test_an_effect_is_what_diff_writes_for_what_a_form_does():
    """Guards: a base that is taught deltas which a11y.diff would never write, or which give another page. The
    sentence is write_reason's, the delta is diff's own, and exactly the expected lines have changed."""
    rng, kinds = random.Random(5), set()
    for _ in range(300):
        turns = base.document(rng)
        page = page_of(turns)
        focused = {node.bid for node in a11y.parse(page)[1:] if "focused" in node.attributes}
        for skill, question, answer in turns:
            if skill != "effect":
                continue
            action = parse_action(question.rpartition("ACTION: ")[2])
            reason, _, delta = answer.partition("\n")
            after, role = a11y.apply(page, delta), a11y.find(page, action.bid).role
            assert reason == world_model.write_reason(page, action) and a11y.diff(page, after) == delta
            (check_an_option if role == "option" else check_another)(page, after, action, focused)
            kinds.add((action.name, role))
    assert {("type", "textbox"), ("click", "checkbox"), ("click", "radio"), ("click", "option"),
            ("click", "button")} <= kinds


def check_all(page: str, goal: str, told: str, answer: str) -> bool:
    """An answer to "compare all" is right; whether it ends at an empty text box."""
    actions = re.findall(r"\n\d+: (?:type \[\d+\] \[(.*)\] \[0\]|click .* is (.*))", told)
    done = [typed or clicked for typed, clicked in actions]
    *rest, last = answer.removesuffix(".").split("; ")
    if ": type [" in told:  # first the text boxes, up to the first that is empty
        boxes = [(node.bid, node.attributes.get("value", "''"))
                 for node in a11y.parse(page) if node.role == "textbox"]
        full = next((k for k, (_, value) in enumerate(boxes) if value == "''"), len(boxes))
        said = [f"[{bid}] is {value}" for bid, value in boxes[:full]]
        said += [f"[{bid}] empty" for bid, _ in boxes[full : full + 1]]
        assert answer.startswith("; ".join(said)), answer
        if full < len(boxes):
            assert answer == "; ".join(said) + "."
            return True
        rest = rest[len(boxes) :]
    assert all(re.fullmatch(r"asked '(.*)' did '\1' same", clause) for clause in rest), answer
    for clause in (*rest, last):
        asked, did, word = re.fullmatch(r"(?:asked '(.*?)' ?)?(?:did '(.*)' )?(\w+)", clause).groups()
        assert (asked is None or asked in goal) and (did is None or did in done), answer
        right = "same" if asked == did else "different"
        assert word == ("extra" if asked is None else "none" if did is None else right), answer
    assert last.endswith("same") == (sorted(done) == sorted(re.findall("asked '(.*?)'", answer))), answer
    return False


def test_lookups_and_comparisons_are_answered_rightly():
    """Guards: a base that is taught wrong answers: an id is that of its name, "same" means equal, everything
    listed is there."""
    rng, count = random.Random(7), Counter()
    for _ in range(400):
        turns = base.document(rng)
        page, told = page_of(turns), turns[0][1].partition("\nURL: ")[2]
        goal = told.partition("\nOBJECTIVE: ")[2].partition("\n")[0]
        told = told.partition("\nQUESTION:")[0]  # the first question may speak of typing too
        names = [node.name for node in a11y.parse(page)]
        for skill, _, answer in turns:
            if skill in ("name -> id", "goal -> id") and (match := re.match(r"'(.*?)' is \[(\d+)\]", answer)):
                assert a11y.find(page, match[2]).name == match[1], answer
            elif skill == "compare":
                asked, did, word = re.fullmatch(r"asked '(.*)' did '(.*)' (same|different)", answer).groups()
                assert (asked == did) == (word == "same"), answer
            elif skill == "compare all":
                count["empty"] += check_all(page, goal, told, answer)
            elif skill == "next line":
                assert re.fullmatch(r"'(.*)' '(.*)'", answer).groups() in list(zip(names, names[1:])), answer
            count[skill] += 1
    often = ("name -> id", "goal -> id", "compare", "compare all", "next line")
    assert min(count[skill] for skill in often) > 100 and count["empty"], count


# ---- the training ------------------------------------------------------------------------------------------

def test_only_answers_and_their_end_are_learned(tokenizer):
    """Guards NOTES 5.8 in the pretraining: pages learned by heart, or answers without an end of turn."""
    turns = base.document(random.Random(1))
    ids, mask = base.encode(tokenizer, turns)
    texts: list[list[int]] = []
    for token, learned, before in zip(ids, mask, [0, *mask]):
        if learned and not before:
            texts.append([])
        if learned:
            texts[-1].append(token)
    assert [tokenizer.decode(text) for text in texts] == [answer + "<|end|>" for _, _, answer in turns]
    written = [f"<|user|>{question}<|end|><|assistant|>{answer}<|end|>" for _, question, answer in turns]
    assert tokenizer.decode(ids) == "".join(written)


def small(tokenizer):
    return base.build_model(base.Config(hidden=192, layers=3), tokenizer)


def test_letters_taken_from_a_model_that_this_script_wrote_are_that_models(tokenizer):
    """Guards: `--init` that scrambles every name. The halves are taken from their sums, which are what was
    there."""
    model = small(tokenizer)
    base.SharedLetters(model, tokenizer)
    before = model.model.embed_tokens.weight.detach().clone()
    again = base.SharedLetters(model, tokenizer, shared=True)
    again.write()
    assert torch.allclose(model.model.embed_tokens.weight, before, atol=1e-4)
    with torch.no_grad():
        again.parts[0] += 1  # the left half of A
    again.write()
    moved = (model.model.embed_tokens.weight - before).abs().amax(1) > 0.5
    moved = tokenizer.convert_ids_to_tokens(moved.nonzero()[:, 0].tolist())
    assert {token[0] for token in moved} == {base.LETTERS[0]}


def test_the_same_seed_begins_with_the_same_weights(tokenizer, monkeypatch):
    """Guards: a pretraining that nobody can repeat: the tokenizer lists its vocabulary in another order in
    every process."""
    began = []
    for reverse in (False, True):
        vocabulary = dict(sorted(tokenizer.get_vocab().items(), reverse=reverse))
        monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self, words=vocabulary: words)
        model = small(tokenizer)
        letters = base.SharedLetters(model, tokenizer)
        began.append([letters.rows, letters.parts.detach(), *(p.detach() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*began, strict=True))
