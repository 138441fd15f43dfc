"""Exercises accept every right answer, refuse the wrong ones that readers give, and never give the solution away."""
import ast
import math
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from minengine import check
from minengine.exercises import Function, Number, UnknownExercise, WrongAnswer, known
from minengine.exercises.kinds import same
from minengine.workload import traces
from minengine.workload.stats import percentile

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = {path.stem[:2]: path.read_text(encoding="utf-8") for path in sorted((ROOT / "chapters").glob("[0-9][0-9]-*.md"))}


def hits_of_the_last_turn(agent):
    result, before = [], ()
    for request in agent:
        shared = 0
        while shared < min(len(before), len(request.hash_ids)) and before[shared] == request.hash_ids[shared]:
            shared += 1
        result.append(shared)
        before = request.hash_ids
    return result


def ideal_hits(agent):
    return list(traces.leading_hits(agent))


def common_blocks(agent):
    return [0] + [len(set(a.hash_ids) & set(b.hash_ids)) for a, b in zip(agent, agent[1:])]


def batches(lengths, places):
    """(static, continuous) steps."""
    free_at = [0] * places
    for length in lengths:
        free_at[free_at.index(min(free_at))] += length
    return sum(max(lengths[i:i + places]) for i in range(0, len(lengths), places)), max(free_at)


def balanced(lengths, places):
    return batches(lengths, places)[0], -(-sum(lengths) // places)


def longest_first(lengths, places):
    return batches(lengths, places)[0], batches(sorted(lengths, reverse=True), places)[1]


def mxfp4(values, code_of_tie=2, most=7, bias=2):
    largest = max(map(abs, values)) or 1.0
    scale = 2.0 ** (math.frexp(largest)[1] - 1 - bias)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6][:most + 1]
    codes = [min(range(most + 1), key=lambda code: (abs(magnitudes[code] - abs(v) / scale), code % code_of_tie)) for v in values]
    return [math.copysign(magnitudes[code] * scale, v) for code, v in zip(codes, values)]


def runs(percent, questions):
    r = 1
    while abs(100 * round(percent / 100 * r * questions) / (r * questions) - percent) > 0.005 + 1e-9:
        r += 1
    return r


def merge(parts):
    highest = max(top for top, _, _ in parts)
    total = sum(math.exp(top - highest) * total for top, total, _ in parts)
    return sum(math.exp(top - highest) * blend for top, _, blend in parts) / total if total else 0.0


def merge_at(parts, top):
    total = sum(math.exp(own - top) * total for own, total, _ in parts)
    return sum(math.exp(own - top) * blend for own, _, blend in parts) / total if total else 0.0


def next_tokens(vocabulary, choices, written):
    return [place for place, token in enumerate(vocabulary) if any(choice.startswith(written + token) for choice in choices)]


def shown(text, tag="<tool_call>"):
    return len(text) - next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)


def cases(bound, z=1.959964):
    return math.ceil(z * z * (1 / bound - 1))


def blocks_in_a_row(here, there):
    follows = dict(zip(here, there))
    return sum(follows.get(a - 1) != b - 1 for a, b in follows.items())


def least_block(token_bytes, bytes_a_us, copy_us, percent):
    tokens = 1
    while 100 * copy_us * bytes_a_us > percent * (copy_us * bytes_a_us + tokens * token_bytes):
        tokens += 1
    return tokens


def ratio(prefill_s, decode_s, workers):
    slower = [max(Fraction(prefill_s) / p, Fraction(decode_s) / (workers - p)) for p in range(1, workers)]
    return slower.index(min(slower)) + 1, workers - 1 - slower.index(min(slower))


def copies(kv_heads, tensor, context):
    return max(1, tensor // kv_heads) // context


def lockstep(steps, dummy=lambda own, step: own == 0 and any(step), wait=lambda own, step: max(step) - own):
    return [(sum(dummy(own, step) for own, step in zip(ranks, steps)), sum(wait(own, step) for own, step in zip(ranks, steps))) for ranks in zip(*steps)]


def nearest_ratio(prefill_s, decode_s, workers):
    prefill = min(max(1, round(workers * prefill_s / (prefill_s + decode_s))), workers - 1)
    return prefill, workers - prefill


def prompt_tokens_computed(past, question, answer, turns, block, apart=0, together=1):
    totals = []
    for rows_of_answer in (apart, max(0, answer - 1) if together else 0):
        prompts = [past + turn * (answer + question) for turn in range(turns)]
        found = [0] + [min(before + rows_of_answer, now - 1) // block * block for before, now in zip(prompts, prompts[1:])]
        totals.append(sum(prompts) - sum(found))
    return tuple(totals)


def until_next_look(steps):
    return sum(s * s for s in steps) / (2 * sum(steps))


def taken(steps, arrives, load, event):
    looks = [sum(steps[:i]) for i in range(len(steps) + 1)]
    begin = arrives if event else min(look for look in looks if look >= arrives)
    return min((look for look in looks if look >= begin + load and look > begin), default=begin + load)


def fewest_blocks(block_size, token_us, start_us, block_us, token_bytes, bytes_a_us):
    computed, back = block_size * token_us, Fraction(block_size * token_bytes, bytes_a_us) + block_us
    return 0 if back >= computed else math.floor(start_us / (computed - back)) + 1


def known_runs(chain, device, tier):
    here = 0
    while here < len(chain) and chain[here] in device:
        here += 1
    there = here
    while there < len(chain) and chain[there] in tier:
        there += 1
    return here, there - here, len(chain) - there


def decoders(sessions, context_tokens, card_tokens, name, whole=True):
    ranks, _, context = name.removeprefix("TP").partition("+DCP")
    held = card_tokens * int(context or 1)  # every rank of the others repeats it
    each = held // context_tokens if whole else held / context_tokens
    return math.ceil(sessions / each) if each >= 1 else 0


RIGHT = {
    "ch01.ex1": lambda latency, ttft, n: (n - 1) * latency / (n * (latency - ttft)),
    "ch01.ex3": hits_of_the_last_turn,
    "ch02.ex1": batches,
    "ch02.ex2": lambda prompt, answer: prompt + answer - 1,
    "ch03.ex2": lambda rank, rope: rank // 2 + rope + rank // 16,
    "ch03.ex3": lambda layer, slot: (layer * 128 + slot) * 352,
    "ch04.ex1": copies,
    "ch04.ex2": lockstep,
    "ch05.ex1": ratio,
    "ch05.ex2": lambda streams, tokens, chunks: min(1, (streams - 1) * chunks / (tokens - 1)),
    "ch05.ex3": prompt_tokens_computed,
    "ch06.ex1": until_next_look,
    "ch06.ex2": lambda cold_tokens, budget, cap: 0 if 0 < cap < budget else cold_tokens // budget,
    "ch06.ex3": taken,
    "ch07.ex1": lambda ratio, before, after: (before - after) / (ratio - 1) - after,
    "ch07.ex2": mxfp4,
    "ch07.ex3": runs,
    "ch08.ex2": lambda j: (j // 2, 4 * (j % 2), 320 + 8 * (j // 16 % 4) + j // 64),
    "ch08.ex3": merge,
    "ch09.ex1": blocks_in_a_row,
    "ch09.ex2": least_block,
    "ch10.ex1": fewest_blocks,
    "ch10.ex2": known_runs,
    "ch11.ex1": next_tokens,
    "ch11.ex2": shown,
    "ch11.ex3": cases,
    "ch12.ex1": lambda sessions, service_s, gap_s: sessions * service_s / (service_s + gap_s),
    "ch12.ex2": lambda latencies_s, tokens: 1 / percentile([s / n for s, n in zip(latencies_s, tokens)], 90),
    "ch12.ex3": decoders,
}
WRONG = {
    "ch01.ex1": [lambda latency, ttft, n: n / (latency - ttft) / (n / latency),  # n gaps instead of n - 1
                 lambda latency, ttft, n: n * (latency - ttft) / ((n - 1) * latency),  # the inverse
                 lambda latency, ttft, n: (n - 1) / (latency - ttft)],  # the speed, not the ratio
    "ch01.ex2": [0.0, 1e6, -1, True, None, "5", float("nan"), float("inf")],
    "ch01.ex3": [ideal_hits, common_blocks, lambda agent: hits_of_the_last_turn(agent)[1:], lambda agent: [0] * len(agent)],
    "ch02.ex1": [balanced, longest_first, lambda lengths, places: (max(lengths), batches(lengths, places)[1]),
                 lambda lengths, places: batches(lengths, places)[::-1]],
    "ch02.ex2": [lambda prompt, answer: prompt + answer, lambda prompt, answer: prompt + answer - 2, lambda prompt, answer: prompt,
                 lambda prompt, answer: -(-(prompt + answer - 1) // 64) * 64],
    "ch03.ex1": [6.6, 373.2e9, 2 * 373.2, 373.2 * 448 / 512, True, None],  # the latent's, bytes, 16 bits, no rotary part
    "ch03.ex2": [lambda rank, rope: rank // 2 + rope // 2 + rank // 16, lambda rank, rope: rank // 2 + rope, lambda rank, rope: rank + rope],
    "ch03.ex3": [lambda layer, slot: (layer * 64 + slot) * 352, lambda layer, slot: (slot * 78 + layer) * 352, lambda layer, slot: layer * 128 + slot],
    "ch04.ex1": [lambda kv_heads, tensor, context: tensor // context,  # as if there were no heads
                 lambda kv_heads, tensor, context: tensor // kv_heads // context,  # no copy at all
                 lambda kv_heads, tensor, context: max(1, tensor // kv_heads),  # nobody splits the sequence
                 lambda kv_heads, tensor, context: max(1, kv_heads // tensor) // context],
    "ch04.ex2": [lambda steps: lockstep(steps, dummy=lambda own, step: own == 0),  # dummies for nobody
                 lambda steps: lockstep(steps, wait=lambda own, step: max(step) if own == 0 else 0),  # only the idle wait
                 lambda steps: lockstep(steps, wait=lambda own, step: max(step) - own if own else 0),  # dummies do not wait
                 lambda steps: [one[::-1] for one in lockstep(steps)],
                 lambda steps: lockstep(steps)[:1]],
    "ch04.ex3": [69.6, 109.3, 268.3, 94.5, 124.9, 134.2e9, True, None],  # exchanged; DEP's weights alone; two bytes; experts in four bits; GiB; bytes
    "ch05.ex1": [nearest_ratio,  # the share, rounded: not always the best whole split
                 lambda prefill_s, decode_s, workers: ratio(decode_s, prefill_s, workers),  # the sides exchanged
                 lambda prefill_s, decode_s, workers: ratio(prefill_s, decode_s, workers)[::-1],
                 lambda prefill_s, decode_s, workers: (workers // 2, workers - workers // 2)],
    "ch05.ex2": [lambda streams, tokens, chunks: min(1, (streams - 1) * chunks / tokens),  # a gap too many
                 lambda streams, tokens, chunks: min(1, streams * chunks / (tokens - 1)),  # its own prompt
                 lambda streams, tokens, chunks: (streams - 1) * chunks / (tokens - 1)],  # more than all
    "ch05.ex3": [lambda *session: prompt_tokens_computed(*session)[::-1],
                 lambda *session: prompt_tokens_computed(*session, together=0),
                 lambda past, question, answer, turns, block: prompt_tokens_computed(past, question, answer, turns, 1),  # no blocks
                 lambda past, question, answer, turns, block: prompt_tokens_computed(past, question, answer, turns, block, apart=answer - 1)],
    "ch06.ex1": [lambda steps: sum(steps) / len(steps) / 2,  # half a mean step
                 lambda steps: 2 * until_next_look(steps), lambda steps: max(steps) / 2, lambda steps: sum(steps) / 2],
    "ch06.ex2": [lambda cold_tokens, budget, cap: -(-cold_tokens // budget),  # nothing is left in the last step
                 lambda cold_tokens, budget, cap: cold_tokens // budget,  # no limit
                 lambda cold_tokens, budget, cap: cold_tokens // min(budget, cap or budget),  # as if nobody else got the rest
                 lambda cold_tokens, budget, cap: 0 if cap else cold_tokens // budget],  # a limit above the budget is none
    "ch06.ex3": [lambda steps, arrives, load, event: taken(steps, arrives, load, True), lambda steps, arrives, load, event: taken(steps, arrives, load, False),
                 lambda steps, arrives, load, event: taken(steps, arrives, load, not event),
                 lambda steps, arrives, load, event: arrives + load,  # somebody always looks
                 lambda steps, arrives, load, event: max(arrives + load, sum(steps))],
    "ch07.ex1": [lambda ratio, before, after: (before - ratio * after) / ratio, lambda ratio, before, after: before - ratio * after,
                 lambda ratio, before, after: before / ratio - after],
    "ch07.ex2": [lambda values: mxfp4(values, code_of_tie=1),  # ties to the lower magnitude
                 lambda values: mxfp4(values, bias=1), lambda values: mxfp4(values, most=6), lambda values: [abs(v) for v in mxfp4(values)],
                 lambda values: values],
    "ch07.ex3": [lambda percent, questions: 1, lambda percent, questions: 2, lambda percent, questions: round(percent / 100 * questions),
                 lambda percent, questions: runs(percent, questions) + 1],
    "ch08.ex1": [37, 39, 61, 0.5, True, None],  # one off, a GB200, one head's share
    "ch08.ex2": [lambda j: (j // 2, 4 * (j % 2), 320 + j // 16),  # scales in order
                 lambda j: (j // 2, 4 - 4 * (j % 2), 320 + 8 * (j // 16 % 4) + j // 64),  # halves exchanged
                 lambda j: (j // 2, 4 * (j % 2), 256 + 8 * (j // 16 % 4) + j // 64),  # rotary key forgotten
                 lambda j: (j % 256, 4 * (j // 256), 320 + 8 * (j // 16 % 4) + j // 64)],  # halves of the latent, not neighbours
    "ch08.ex3": [lambda parts: sum(blend for _, _, blend in parts) / (sum(total for _, total, _ in parts) or 1.0),  # no common maximum
                 lambda parts: sum(blend / total for _, total, blend in parts if total) / (len(parts) or 1),  # a mean of means
                 lambda parts: merge_at(parts, 0.0),  # overflows
                 lambda parts: merge_at(parts, max(top for top, _, _ in parts) + 800),  # underflows
                 lambda parts: merge(parts) or None],
    "ch09.ex1": [lambda here, there: len(here),  # nothing merges
                 lambda here, there: 1 + sum(b != a + 1 for a, b in zip(here, here[1:])),  # one side alone, in the order listed
                 lambda here, there: sum(a - 1 not in here for a in here),  # one side alone
                 lambda here, there: 1 + sum((c, d) != (a + 1, b + 1) for (a, b), (c, d) in zip(zip(here, there), zip(here[1:], there[1:]))),  # as listed
                 lambda here, there: sum(a - 1 not in here or b - 1 not in there for a, b in zip(here, there))],  # neighbours, but not each other's
    "ch09.ex2": [lambda token_bytes, bytes_a_us, copy_us, percent: -(-copy_us * bytes_a_us * 100 // (percent * token_bytes)),  # a share of the bytes' time
                 lambda token_bytes, bytes_a_us, copy_us, percent: least_block(token_bytes, bytes_a_us, copy_us, 100 - percent),
                 lambda token_bytes, bytes_a_us, copy_us, percent: least_block(token_bytes, bytes_a_us, copy_us, percent) + 1,
                 lambda token_bytes, bytes_a_us, copy_us, percent: copy_us * (100 - percent) * bytes_a_us / (percent * token_bytes)],  # no whole tokens
    "ch09.ex3": [238.9, 1286.5, 0.1235, 3.86, True, None],  # all of the time is the pieces', of the few; seconds; of one piece
    "ch10.ex1": [lambda n, token, start, block, nbytes, rate: -(-start * rate // saved) if (saved := (n * token - block) * rate - n * nbytes) > 0 else 0,  # as quick
                 lambda n, token, start, block, nbytes, rate: start * rate // saved + 1 if (saved := n * token * rate - n * nbytes) > 0 else 0,  # blocks are free
                 lambda n, token, start, block, nbytes, rate: start * rate // saved + 1 if (saved := (n * token - block) * rate - nbytes) > 0 else 0,  # one token's bytes
                 lambda *costs: 1 if costs[2] == 0 else fewest_blocks(*costs),  # no start: any road will do
                 lambda *costs: fewest_blocks(*costs) or None],  # never is not at once
    "ch10.ex2": [lambda chain, device, tier: (n := sum(h in device for h in chain), m := sum(h in tier - device for h in chain), len(chain) - n - m),  # no runs
                 lambda chain, device, tier: (n := known_runs(chain, device, ())[0], m := max(0, known_runs(chain, tier, ())[0] - n), len(chain) - n - m),  # from the front
                 lambda chain, device, tier: (n := known_runs(chain, device, ())[0], m := known_runs(chain, device | tier, ())[0] - n, len(chain) - n - m),  # back and forth
                 lambda chain, device, tier: known_runs(chain, tier, device),  # the tier first
                 lambda chain, device, tier: known_runs(chain, device, tier)[:2]],
    "ch10.ex3": [264.6, 144.3, 88_186_000_000.0, 82.1, True, None],  # all sessions; 8 bits; bytes; GiB
    "ch11.ex1": [lambda vocabulary, choices, written: [i for i, token in enumerate(vocabulary) if written + token in choices],  # only what ends a choice
                 lambda vocabulary, choices, written: [i for i, token in enumerate(vocabulary) if any(token in choice for choice in choices)],  # anywhere
                 lambda vocabulary, choices, written: next_tokens(vocabulary, choices, ""),  # what is written is forgotten
                 lambda vocabulary, choices, written: next_tokens(vocabulary, choices[:1], written),
                 lambda vocabulary, choices, written: [vocabulary[i] for i in next_tokens(vocabulary, choices, written)],  # tokens, not places
                 lambda vocabulary, choices, written: [  # a token may go beyond its choice
                     i for i, token in enumerate(vocabulary)
                     if any((written + token).startswith(choice) or choice.startswith(written + token) for choice in choices)]],
    "ch11.ex2": [len,  # a tag may be coming
                 lambda text: max(0, len(text) - 10),  # always holds as much as a tag could need
                 lambda text: text.find("<") if "<" in text else len(text),  # holds from the first sign on
                 lambda text: text.rfind("<") if "<" in text else len(text),
                 lambda text: shown(text, "<tool_call")],
    "ch11.ex3": [lambda bound: math.ceil(3 / bound),  # the rule of three
                 lambda bound: math.ceil(1.959964 ** 2 / bound), lambda bound: cases(bound) - 1, lambda bound: cases(bound, 1.644854),
                 lambda bound: 1.959964 ** 2 * (1 / bound - 1)],
    "ch12.ex1": [lambda sessions, service_s, gap_s: sessions,  # every session is a stream
                 lambda sessions, service_s, gap_s: sessions * service_s / max(gap_s, 1e-9),  # against the gap alone
                 lambda sessions, service_s, gap_s: sessions * gap_s / (service_s + gap_s)],  # those that pause
    "ch12.ex2": [lambda latencies_s, tokens: percentile([n / s for s, n in zip(latencies_s, tokens)], 90),  # inverted first: the fast tenth
                 lambda latencies_s, tokens: sum(tokens) / sum(latencies_s),  # a mean
                 lambda latencies_s, tokens: percentile([s / n for s, n in zip(latencies_s, tokens)], 90)],  # not inverted
    "ch12.ex3": [lambda *how: decoders(*how, whole=False),  # a session cut in two
                 lambda sessions, context, card, name: decoders(sessions, context, card * int(name[2]), name),  # as if there were one copy
                 lambda sessions, context, card, name: decoders(sessions, context, card, name.partition("+")[0]),  # DCP forgotten
                 lambda *how: decoders(*how) or None],
}


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_a_right_answer_is_right(name, capsys):
    check(name, RIGHT[name])
    assert re.fullmatch(r"Right, in all \d{2,} cases\.\n", capsys.readouterr().out)


def test_a_cap_between_too_small_and_too_large_gives_the_share(capsys):
    low, high = 0.0, 1000.0
    for _ in range(40):
        middle = (low + high) / 2
        try:
            check("ch01.ex2", middle)
            break
        except WrongAnswer as error:
            low, high = (middle, high) if "it is too large" in str(error) else (low, middle)
    assert capsys.readouterr().out == f"Right: {middle:.4g}.\n"


@pytest.mark.parametrize("name, answer", [pytest.param(name, answer, id=f"{name}-{i}") for name, answers in WRONG.items() for i, answer in enumerate(answers)])
def test_a_wrong_answer_gets_a_hint(name, answer, capsys):
    with pytest.raises(WrongAnswer) as caught:
        check(name, answer)
    chapter, number = name.split(".")
    exercise = sys.modules[f"minengine.exercises.{chapter}"].EXERCISES[number]
    assert exercise.hint in str(caught.value) and not capsys.readouterr().out


def test_every_exercise_has_wrong_answers_and_stands_in_its_chapter():
    assert set(known()) == set(WRONG)
    for name in known():
        text = CHAPTERS[name[2:4]]
        assert f'check("{name}", ' in re.sub(r"^```\{solution-start\}.*?^```\{solution-end\}", "", text, flags=re.MULTILINE | re.DOTALL), "the task names it"
    said = {name for text in CHAPTERS.values() for name in re.findall(r'check\("(ch\d\d\.ex\d+)"', text)}
    assert said <= set(known())


def test_the_folded_solutions_of_the_chapters_call_check():
    for chapter, text in CHAPTERS.items():
        solutions = "\n".join(re.findall(r"^```\{solution-start\}.*?^```\{solution-end\}", text, flags=re.MULTILINE | re.DOTALL))
        for name in known():
            if name.startswith(f"ch{chapter}."):
                assert f'check("{name}", ' in solutions, name


@pytest.mark.parametrize("name", ["ch01.ex9", "ch77.ex1", "row", "", None, "kinds.ex1"])
def test_an_unknown_exercise_lists_the_known_ones(name):
    with pytest.raises(UnknownExercise, match="ch01.ex1, ch01.ex2, ch01.ex3, ch02.ex1"):
        check(name, 1)


def test_a_number_says_which_way_and_keeps_the_solution(capsys):
    number = Number(value=lambda: 2400 / 101, hint="Divide.")
    assert number.check(23.8, "x") == "Right: 23.8."
    for answer, word in ((66, "66 is too large"), (1.0, "1 is too small")):
        with pytest.raises(WrongAnswer, match=f"{word}. Divide.") as caught:
            number.check(answer, "x")
        assert "23.7" not in str(caught.value)
    with pytest.raises(WrongAnswer, match="a finite number is asked for. Divide."):
        number.check("24", "x")


def test_a_function_stops_at_the_first_difference_and_repeats_its_draws():
    drawn = []
    twice = Function(reference=lambda n: drawn.append(n) or 2 * n, draw=lambda random: (random.randint(3, 10**6),), hint="Twice.", corners=((2,),), tries=5)

    def square(n):
        return n * n

    for _ in range(2):
        with pytest.raises(WrongAnswer, match=r"square\(\d+\) gives \d+, and that is not it. Twice.") as caught:
            twice.check(square, "seed")
        assert str(2 * drawn[-1]) not in str(caught.value)
    assert drawn[0] == drawn[2] == 2 and drawn[1] == drawn[3] and len(drawn) == 4
    assert twice.check(lambda n: n + n, "seed") == "Right, in all 6 cases."
    with pytest.raises(WrongAnswer, match=r"hand it over without calling it. Twice."):
        twice.check(4, "seed")
    with pytest.raises(WrongAnswer, match=r"<lambda>\(2\) ends with ZeroDivisionError: .*. Twice."):
        twice.check(lambda n: n // 0, "seed")


def test_long_arguments_are_cut_in_messages():
    with pytest.raises(WrongAnswer) as caught:
        check("ch01.ex3", lambda agent: None)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("got, wanted, equal", [
    (2, 2, True), (2.0, 2, True), (3, 2, False), (True, 1, False), (None, 2, False), ("2", 2, False), (0.1 + 0.2, 0.3, True), (0.3001, 0.3, False),
    ([1, 2], (1, 2), True), ([1], (1, 2), False), ([1, 3], (1, 2), False), (1, (1,), False), ([0.1 + 0.2], [0.3], True),
])
def test_what_counts_as_the_same(got, wanted, equal):
    assert same(got, wanted) is equal


def test_check_costs_nothing_until_it_is_used():
    code = "import sys, minengine; from minengine import check; check.__doc__; import minengine.exercises; print('torch' in sys.modules, 'yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "False False\n"


def test_the_files_hold_exercises_only_where_chapters_are():
    files = sorted((ROOT / "minengine/exercises").glob("ch*.py"))
    assert {file.stem for file in files} == {name.split(".")[0] for name in known()}
    for file in files:
        assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))).startswith("Exercises of ")
