"""Claims about tiny/base.py: the tokenizer loses nothing, and the questions are honest."""
import random
import re
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import a11y
import world_model
from data import SYSTEM, parse_action
from tiny import base

models = settings.get_profile("models")


@given(st.text() | st.lists(st.sampled_from(base.phrases()) | st.text(alphabet="aZ09 '[]\t\n", max_size=5), max_size=10).map("".join))
@example("a" * 500)
@example("\u2028\U0001f600é\x00\x85")
@settings(models, max_examples=300)
def test_every_text_reads_back_from_its_tokens(tokenizer, text):
    """Guards: a page that is not the page after decoding (unknown tokens, cleaned-up spaces, long words): its delta would be another's."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not any(token in text for token in base.TURN):
        assert tokenizer.decode(ids) == text and tokenizer.pad_token_id not in ids


@given(st.integers(0, 10**9))
@settings(models, max_examples=50)
def test_a_string_is_the_same_tokens_wherever_it_stands(tokenizer, seed):
    """Guards what copying rests on: attention finds a name only if the goal, the page and the answer spell it alike."""
    name = base.random_name(random.Random(seed), False, words=(1,))
    spell = lambda before, after: tokenizer.convert_ids_to_tokens(tokenizer(before + name + after, add_special_tokens=False).input_ids)
    alone = spell("", "")
    for before, after in (("[3] button '", "', clickable, visible"), ("type [5] [", "] [0]"), ('"', '"'), ("asked '", "' did '")):
        assert "\x00".join(alone) in "\x00".join(spell(before, after)), (before, after)


def test_ids_roles_and_headers_are_one_token_each(tokenizer):
    """Guards: ids of several tokens (a lookup of two hops where one is learned), a template whose fixed words cost what the page should."""
    for text in [str(n) for n in range(10, 400)] + [f"] {role} '" for role in base.ROLES] + ["\n\t[", ", checked='true'", "OBSERVATION:\n", "\nOBJECTIVE: ", "COMPLETED: YES", "COMPLETED: NO", "\nover: yes", "click ["]:
        assert len(tokenizer(text, add_special_tokens=False).input_ids) == 1, text


def test_the_template_leaves_the_system_message_out_and_marks_each_turn(tokenizer):
    """Guards: hundreds of tokens of instructions before every page of the laptop's recipe."""
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "<|user|>u<|end|><|assistant|>a<|end|><|user|>v<|end|><|assistant|>"


@pytest.mark.parametrize("test", [False, True])
def test_what_is_held_out_is_in_no_training_document_and_a_test_asks_for_nothing_else(test):
    """Guards gate 1: strings that were trained on, measured as unseen. All names and values of the page, what is typed, and all that stands in
    quotes in questions and answers; plain words and titles do not count."""
    rng, seen = random.Random(3), 0
    for _ in range(150):
        turns = base.document(rng, test=test)
        page = turns[0][1].partition("\nURL: ")[0].removeprefix("OBSERVATION:\n")
        strings = {node.name for node in a11y.parse(page)[1:] if node.name} | {a11y.unquote(node.attributes["value"]) for node in a11y.parse(page) if "value" in node.attributes}
        strings |= {text for text in re.findall(r"type \[\d+\] \[([^\]]*)\]", turns[0][1] + str([question for _, question, _ in turns]))}
        for _, question, answer in turns:
            strings |= {text for text in re.findall(r"'([^']+)'", question.partition("QUESTION: ")[2] or question) + re.findall(r"(?:asked|did) '([^']+)'", answer) if text}
        strings -= {"true", "false", "menu"}
        seen += len(strings)
        assert all(base.held_out(text) == test for text in strings), [text for text in strings if base.held_out(text) != test]
    assert seen > 1000


def test_an_effect_is_what_diff_writes_for_what_a_form_does():
    """Guards: a base that is taught deltas which a11y.diff would never write, or that give another page: the world model would have to unlearn them.
    The sentence is write_reason's, the delta is diff's own, and on the page that it gives exactly the expected lines have changed."""
    rng, kinds = random.Random(5), set()
    for _ in range(300):
        turns = base.document(rng)
        page = turns[0][1].partition("\nURL: ")[0].removeprefix("OBSERVATION:\n")
        for skill, question, answer in turns:
            if skill != "effect":
                continue
            action = parse_action(question.rpartition("ACTION: ")[2])
            reason, _, delta = answer.partition("\n")
            after = a11y.apply(page, delta)
            assert reason == world_model.write_reason(page, action) and a11y.diff(page, after) == delta
            node, was, now = a11y.find(page, action.bid), a11y.parse(page), a11y.parse(after)
            changed = {new.bid for old, new in zip(was, now, strict=True) if old != new}
            focused = [new.bid for new in now[1:] if "focused" in new.attributes]
            before_focused = {old.bid for old in was[1:] if "focused" in old.attributes}
            new = a11y.find(after, action.bid)
            kinds.add((action.name, node.role))
            if node.role == "option":
                holder = next(old for old in reversed(was[: was.index(node)]) if old.role == "combobox")
                assert focused == [holder.bid] and new.attributes["selected"] == "True" and a11y.unquote(a11y.find(after, holder.bid).attributes["value"]) == node.name
                group = [k for k in range(was.index(holder) + 2, len(was))]
                end = next((k for k in group if was[k].role != "option"), len(was))
                chosen = [k.name for k in now[was.index(holder) : end] if k.attributes.get("selected") == "True"]
                assert chosen == [node.name] and changed <= {k.bid for k in was[was.index(holder) : end]} | before_focused
                continue
            assert focused == [action.bid] and changed <= {action.bid} | before_focused
            if action.name == "type":
                assert a11y.unquote(new.attributes["value"]) == action.text
            elif node.role in ("checkbox", "radio"):
                flipped = node.role == "radio" or node.attributes["checked"] == "'false'"
                assert new.attributes["checked"] == ("'true'" if flipped else "'false'")
            else:
                assert new.attributes.get("value") == node.attributes.get("value")
    assert {("type", "textbox"), ("click", "checkbox"), ("click", "radio"), ("click", "option"), ("click", "button")} <= kinds


def test_lookups_and_comparisons_are_answered_rightly():
    """Guards: a base that is taught wrong answers. From the text alone: an id is that of its name, "same" means equal, everything listed is there."""
    rng, count = random.Random(7), Counter()
    for _ in range(400):
        turns = base.document(rng)
        page, _, told = turns[0][1].partition("\nURL: ")
        page, goal = page.removeprefix("OBSERVATION:\n"), told.partition("\nOBJECTIVE: ")[2].partition("\n")[0]
        told = told.partition("\nQUESTION:")[0]  # the first question may speak of typing too
        done = re.findall(r"\n\d+: (?:type \[\d+\] \[(.*)\] \[0\]|click .* is (.*))", told)
        for skill, _, answer in turns:
            if skill in ("name -> id", "goal -> id") and (match := re.match(r"'(.*?)' is \[(\d+)\]", answer)):
                assert a11y.find(page, match[2]).name == match[1], answer
            elif skill == "compare":
                match = re.fullmatch(r"asked '(.*)' did '(.*)' (same|different)", answer)
                assert (match[1] == match[2]) == (match[3] == "same"), answer
            elif skill == "compare all":
                *rest, last = answer.removesuffix(".").split("; ")
                said: list[str] = []
                if ": type [" in told:  # first the text boxes, up to one that is empty
                    boxes = [(node.bid, node.attributes.get("value", "''")) for node in a11y.parse(page) if node.role == "textbox"]
                    empty = next((k for k, (_, value) in enumerate(boxes) if value == "''"), len(boxes))
                    said = [f"[{bid}] is {value}" for bid, value in boxes[:empty]] + [f"[{bid}] empty" for bid, _ in boxes[empty : empty + 1]]
                    assert answer.startswith("; ".join(said)), answer
                    rest = rest[len(boxes) :]
                if said and said[-1].endswith("empty"):
                    assert answer == "; ".join(said) + "."
                    count["empty"] += 1
                    continue
                assert all(re.fullmatch(r"asked '(.*)' did '\1' same", pair) for pair in rest), answer
                names = [typed or clicked for typed, clicked in done]
                for asked, did, verdict in (re.fullmatch(r"(?:asked '(.*?)' ?)?(?:did '(.*)' )?(\w+)", pair).groups() for pair in (*rest, last)):
                    assert (asked is None or asked in goal) and (did is None or did in names), answer
                    assert verdict == ("extra" if asked is None else "none" if did is None else "same" if asked == did else "different"), answer
                assert last.endswith("same") == (sorted(names) == sorted(asked for asked in re.findall("asked '(.*?)'", answer))), answer
            elif skill == "next line":
                names = [node.name for node in a11y.parse(page)]
                one, two = re.fullmatch(r"'(.*)' '(.*)'", answer).groups()
                assert any(pair == (one, two) for pair in zip(names, names[1:])), answer
            count[skill] += 1
    assert min(count[skill] for skill in ("name -> id", "goal -> id", "compare", "compare all", "next line")) > 100, count


def test_only_answers_and_their_end_are_learned(tokenizer):
    """Guards trap 8 in the pretraining: pages learned by heart, or answers without an end-of-turn."""
    turns = base.document(random.Random(1))
    ids, mask = base.encode(tokenizer, turns)
    texts = []
    for token, keep, before in zip(ids, mask, [0, *mask]):
        if keep and not before:
            texts.append([])
        if keep:
            texts[-1].append(token)
    assert [tokenizer.decode(text) for text in texts] == [answer + "<|end|>" for _, _, answer in turns]
    assert tokenizer.decode(ids) == "".join(f"<|user|>{question}<|end|><|assistant|>{answer}<|end|>" for _, question, answer in turns)


def test_letters_taken_from_a_model_that_this_script_wrote_are_that_models(tokenizer):
    """Guards: `--init` that scrambles every name. The halves are taken from their sums, and the sums of those are what was there."""
    model = base.build_model(base.Config(hidden=192, layers=3), tokenizer)
    base.SharedLetters(model, tokenizer)
    before = model.model.embed_tokens.weight.detach().clone()
    again = base.SharedLetters(model, tokenizer, shared=True)
    again.write()
    assert torch.allclose(model.model.embed_tokens.weight, before, atol=1e-4)
    with torch.no_grad():
        again.parts[0] += 1  # the left half of A
    again.write()
    moved = (model.model.embed_tokens.weight - before).abs().amax(1) > 0.5
    assert {tokenizer.convert_ids_to_tokens(k)[0] for k in moved.nonzero()[:, 0].tolist()} == {base.LETTERS[0]}
