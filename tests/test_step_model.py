"""Machines as named constants, and what a step takes by them: against sums done by hand, and by what must hold of any model of costs."""
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from minengine.arithmetic import CARDS, mean_visits, rank_weights, step_sent, topology
from minengine.config import ConfigError
from minengine.simulate.cost import StepCost
from minengine.simulate.machine import CONSTANTS, LinearMachine, Machine, machine, machine_names
from minengine.simulate.step_model import MODELS, PARTS, StepModel, open_costs, unvisited
from minengine.simulate.work import NOTHING, LinearCosts, Work

GLM = MODELS["glm-5.3"]
GB200 = machine("gb200-nvl72")
TOPOLOGIES = ["TP1", "TP4", "TP8", "TEP8", "DEP8", "DEP16", "TP8+DCP4"]
SPECULATING = dict(draft_tokens=4, tokens_per_step=3.33)


def work(decodes=0, context=0, prefill=0, prefix=0):
    attended = min(context, 2048 * decodes)
    pairs = prefill * prefix + prefill * (prefill + 1) // 2
    return Work(decodes, context, attended, prefill, pairs, min(pairs, 2048 * prefill), decodes)


works = st.builds(work, st.integers(0, 40), st.integers(0, 8_000_000), st.integers(0, 8192), st.integers(0, 200_000))


def group_of(model, one):
    return [one] * model.shape.data


# --- machines ------------------------------------------------------------------------------------------------------

def test_each_machine_of_the_package_can_be_read_and_says_where_its_numbers_come_from():
    assert {"gb200-nvl72", "h200"} <= set(machine_names())
    for name in machine_names():
        found = machine(name)
        if isinstance(found, Machine):
            assert set(found.constants) == set(CONSTANTS)
            assert all(one.source for one in found.constants.values()), name


def test_each_machine_of_the_package_prices_steps_and_a_slower_card_takes_longer():
    took = {name: open_costs(name, "TP8").rank_ps([work(8, 800_000)])[0] for name in machine_names()}
    assert all(isinstance(ps, int) and ps > 0 for ps in took.values())
    prompts = {name: open_costs(name, "TP8").rank_ps([work(prefill=4096, prefix=100_000)])[0] for name in ("gb200-nvl72", "h200")}
    assert prompts["h200"] > prompts["gb200-nvl72"]


def test_a_machine_is_the_same_from_a_name_a_path_and_a_mapping(tmp_path):
    import yaml

    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump(GB200.mapping()))
    assert machine(path) == machine(GB200.mapping()) == machine(GB200) == GB200


@pytest.mark.parametrize("change, words", [
    ({"kind": "guess"}, "kind='guess'"), ({"card": "GB9"}, "card='GB9'"),
    ({"constants": {}}, "is missing"), ({"launches": {"gemm": 1}}, "is missing"),
    ({"constants": {**GB200.mapping()["constants"], "speed": 1}}, "speed is unknown"),
    ({"constants": {**GB200.mapping()["constants"], "memory_share": {"value": 1.2}}}, "memory_share=1.2"),
    ({"constants": {**GB200.mapping()["constants"], "link_bytes_s": {"value": "fast"}}}, "link_bytes_s='fast'"),
    ({"constants": {**GB200.mapping()["constants"], "launch_s": {"value": -1}}}, "launch_s=-1"),
    ({"constants": {**GB200.mapping()["constants"], "launch_s": {"value": 1, "label": "sure"}}}, "label='sure'"),
    ({"launches": {**GB200.mapping()["launches"], "gemm": 0.5}}, "gemm=0.5"),
])
def test_a_machine_that_is_wrong_is_refused_by_field(change, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        machine({**GB200.mapping(), **change})


def test_a_machine_that_is_not_there_or_no_mapping_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="gb200-nvl72"):
        machine("gb9000")
    (tmp_path / "list.yml").write_text("- 1\n")
    (tmp_path / "broken.yml").write_text("a: [\n")
    for name in ("list.yml", "broken.yml"):
        with pytest.raises(ConfigError, match="machines for examples"):
            machine(tmp_path / name)
    with pytest.raises(ConfigError, match="speed is unknown"):
        GB200.but(speed=1)


def test_a_linear_machine_prices_steps_as_it_was_measured_in_any_topology():
    found = machine({"kind": "linear", "base_s": 0.5, "decode_s": 0.25, "prefill_s": 0.125, "attention_s": 1e-6, "piece_s": 1e-3, "measured": {"on": "a page"}})
    assert isinstance(found, LinearMachine) and found.cost == StepCost(base_s=0.5, decode_s=0.25, prefill_s=0.125, attention_s=1e-6)
    costs = open_costs(found, "DEP2")
    assert isinstance(costs, LinearCosts)
    assert costs.rank_ps([work(2, 100), NOTHING]) == [10**12 + 100 * 10**6, 5 * 10**11]
    assert costs.transfer_ps(7, 10**9) == 7 * 10**9
    for wrong in ({"base": 1}, {"piece_s": -1.0}):
        with pytest.raises(ConfigError):
            machine({"kind": "linear", **wrong})


def test_this_machine_is_the_one_that_was_calibrated_here(tmp_path, monkeypatch):
    shipped = machine("this-machine")
    monkeypatch.chdir(tmp_path)
    assert machine("this-machine") == shipped
    (tmp_path / "this-machine.yml").write_text("kind: linear\nbase_s: 0.5\nattention_s: 1.4e-06\n")
    assert machine("this-machine").cost.base_s == 0.5 and machine("gb200-nvl72") == GB200


@pytest.mark.parametrize("wrong, words", [
    (dict(draft_tokens=-1), "draft_tokens"), (dict(draft_tokens=2, tokens_per_step=3.5), "tokens_per_step=3.5"),
    (dict(tokens_per_step=0.5), "tokens_per_step=0.5"),
    (dict(weights="int9"), "weights|dtype"), (dict(kv_cache_dtype="q9"), "kv_cache_dtype"), (dict(model="glm-9"), "model='glm-9'"),
])
def test_an_engine_that_cannot_be_is_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        open_costs(GB200, "TP4", **wrong)
    with pytest.raises(ConfigError, match="TP3"):
        open_costs(GB200, "TP3")


# --- by hand -------------------------------------------------------------------------------------------------------

@given(st.integers(0, 3000))
def test_experts_that_nobody_visits(tokens):
    assert unvisited(GLM, tokens) == pytest.approx((31 / 32) ** tokens, rel=1e-12)
    assert unvisited(GLM, tokens + 0.5) == pytest.approx((unvisited(GLM, tokens) + unvisited(GLM, tokens + 1)) / 2, rel=1e-12)


def test_a_decode_step_of_tp4_by_hand():
    model = StepModel(GB200, "TP4")
    six, memory = work(6, 6 * 146_000), 8.0e12 * GB200["memory_share"]
    weights = rank_weights(GLM, "TP4", 0, "bfloat16", "nvfp4")
    beside = sum(weights[part] for part in ("attention", "mlp", "shared experts", "indexers", "routers", "norms"))
    expert = 3 * 6144 * 2048 * 4.5 / 8 / 4  # bytes here of one in a layer, a quarter of each
    visited = 75 * 256 * (1 - (31 / 32) ** 6) * expert
    sent = step_sent(GLM, "TP4", 0, 6, 6, dtype="bfloat16")
    parts = model.parts(six, 6)
    launch = GB200["launch_s"]
    assert parts["gemm"] == pytest.approx((beside + visited + weights["vocabulary"] / 2) / memory + 888 * launch)
    assert parts["indexer"] == pytest.approx(21 * 132 * 876_000 / memory + 288 * launch)
    assert parts["attention"] == pytest.approx(78 * 352 * 6 * 2048 / memory + 78 * launch)
    assert parts["exchange"] == pytest.approx(158 * GB200["near_meeting_s"] + sum(one.nbytes for one in sent.values()) / (9e11 * GB200["exchange_share"]))
    assert parts["rest"] == pytest.approx(6 * GB200["token_s"] + 1010 * launch)
    assert model.rank_ps([six])[0] == pytest.approx(1e12 * sum(parts.values()), rel=1e-3)  # slopes are whole picoseconds a row


def test_guesses_by_hand():
    """Six requests verify 30 tokens: chosen rows are read for each; keys once, but scoring them five times takes longer; 30 tokens visit more experts."""
    model, six, memory, launch = StepModel(GB200, "TP4", **SPECULATING), work(6, 876_000), 8.0e12 * GB200["memory_share"], GB200["launch_s"]
    parts, one = model.parts(six, 30, 5), model.parts(six, 6)
    assert parts["attention"] == pytest.approx(5 * (one["attention"] - 78 * launch) + 78 * launch)
    scored = 21 * 876_000 * 5 * 2 * 32 * 128 / (2 * CARDS["GB200"].matrix_flops_s * GB200["indexer_share"])
    assert parts["indexer"] == pytest.approx(scored + 288 * launch) and parts["indexer"] < 5 * one["indexer"]
    experts = rank_weights(GLM, "TP4", 0, "bfloat16", "nvfp4")["experts"]
    assert parts["gemm"] - one["gemm"] == pytest.approx(experts * ((31 / 32) ** 6 - (31 / 32) ** 30) / memory)
    head = rank_weights(GLM, "TP4", 0, "bfloat16")["vocabulary"] / 2 / memory
    assert model.draft_s(six, 6) == pytest.approx(4 * ((sum(one.values()) - head) / 78 + head))  # each guess: one layer of 78, and the head


def test_a_decode_step_of_dep8_visits_the_experts_of_all_ranks_tokens():
    model, memory = StepModel(GB200, "DEP8"), 8.0e12 * GB200["memory_share"]
    experts = rank_weights(GLM, "DEP8", 0, "bfloat16", "nvfp4")["experts"]
    assert experts == 75 * 32 * 3 * 6144 * 2048 * 9 / 16
    alone, together = model.parts(work(2, 1000), 2), model.parts(work(2, 1000), 16)
    assert together["gemm"] - alone["gemm"] == pytest.approx(experts * ((31 / 32) ** 2 - (31 / 32) ** 16) / memory)


def test_a_prompt_on_all_ranks_of_dep8_by_hand():
    model, flops = StepModel(GB200, "DEP8"), CARDS["GB200"].matrix_flops_s
    chunk = work(prefill=4096, prefix=100_000)
    parts = model.parts(chunk, 8 * 4096)
    pairs = 4096 * 100_000 + 4096 * 4097 / 2
    values = {part: nbytes / 4 for part, nbytes in rank_weights(GLM, "DEP8", 0).items()}
    dense = sum(values[part] for part in ("attention", "mlp", "shared experts", "indexers", "routers"))
    experts = 75 * 8 * 3 * 6144 * 2048  # that a token visits; all ranks' tokens visit all ranks
    launch = GB200["launch_s"]
    assert parts["gemm"] == pytest.approx(2 * 4096 * (dense + experts / 4) / (flops * GB200["gemm_share"]) + 888 * launch)  # 4 bits: four times the peak
    assert parts["indexer"] == pytest.approx(21 * pairs * 2 * 32 * 128 / (2 * flops * GB200["indexer_share"]) + 288 * launch)
    assert parts["attention"] == pytest.approx(78 * 4096 * 2048 * 64 * 2 * (576 + 512) / (flops * GB200["attention_share"]) + 78 * launch)
    visits = mean_visits(GLM, "DEP8", 0, 4096)
    assert visits == 75 * 4096 * 8 * 7 / 8
    sent = 75 * 7 * 32 * 8 + 2 * visits * 6144 * 2  # to seven ranks with 32 experts how many rows come; then the rows, there and back
    assert parts["exchange"] == pytest.approx(225 * GB200["far_meeting_s"] + sent / (9e11 * GB200["exchange_share"]))


def test_parts_that_topologies_share_out():
    six = work(6, 900_000)
    parts = {name: StepModel(GB200.but(launch_s=1e-15), name).parts(six, 6) for name in TOPOLOGIES}
    assert parts["TP8"]["indexer"] == parts["TP4"]["indexer"] == parts["DEP8"]["indexer"]  # every rank has all keys
    assert parts["TP8+DCP4"]["indexer"] == pytest.approx(parts["TP8"]["indexer"] / 4)
    assert parts["TP8+DCP4"]["attention"] == pytest.approx(parts["TP8"]["attention"] / 4)  # rows are dealt out; queries are gathered
    assert parts["TP8"]["gemm"] < parts["TP4"]["gemm"] < parts["TP1"]["gemm"] < 4 * parts["TP4"]["gemm"]
    for name in ("TP4", "TP8"):
        model = StepModel(GB200, name)
        assert model._bytes["experts"] * topology(name).tensor == StepModel(GB200, "TP1")._bytes["experts"]
    meetings = {name: sum(one.calls for one in step_sent(GLM, name, 0, 6, 6, choices=[6], visits_out=1, visits_in=1).values()) for name in TOPOLOGIES}
    assert meetings["TP8+DCP4"] == meetings["TP8"] + 2 * 78 + 21
    assert parts["TP8+DCP4"]["exchange"] > parts["TP8"]["exchange"] > parts["TP4"]["exchange"]  # across boards
    assert parts["TP1"]["exchange"] == 0


# --- what must hold ------------------------------------------------------------------------------------------------

@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TOPOLOGIES), works, st.integers(0, 5), st.integers(0, 100_000), st.integers(0, 500), st.sampled_from([{}, SPECULATING]))
def test_more_work_never_takes_less(name, one, decodes, rows, tokens, how):
    model = StepModel(GB200, name, **how)
    more = one._replace(decodes=one.decodes + decodes, context=one.context + rows, prefill_tokens=one.prefill_tokens + tokens,
                        prefill_pairs=one.prefill_pairs + rows, sampled=one.sampled + decodes)
    if not one.prefill_tokens:
        more = more._replace(prefill_tokens=0, prefill_pairs=0)
    assert all(a <= b for a, b in zip(model.rank_ps(group_of(model, one)), model.rank_ps(group_of(model, more))))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TOPOLOGIES), st.lists(works, min_size=16, max_size=16), st.integers(0, 100_000), st.integers(0, 3000),
       st.sampled_from([{}, SPECULATING]))
def test_decodes_alone_are_whole_and_affine_in_their_rows(name, many, rows, attended, how):
    model = StepModel(GB200, name, **how)
    many = [replace_prompts(one) for one in many[:model.shape.data]]
    at = model.rank_ps(many)
    assert all(isinstance(ps, int) and ps > 0 for ps in at)
    for times in (1, 2, 5):
        grown = model.rank_ps([one._replace(context=one.context + times * rows, attended=one.attended + times * attended) for one in many])
        slope = [(a - b) for a, b in zip(grown, at)]
        assert slope == [times * (rows * model._slopes[0] + attended * model._slopes[1])] * len(many)


def replace_prompts(one):
    return Work(one.decodes, one.context, one.attended, sampled=one.decodes)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["DEP8", "DEP16"]), works)
def test_a_rank_without_tokens_takes_what_a_forward_of_none_takes_and_no_more_than_its_peers(name, one):
    model = StepModel(GB200, name)
    found = model.rank_ps([NOTHING] + [one] * (model.shape.data - 1))
    group = Work(*((model.shape.data - 1) * count for count in one))
    dummy = model.forward_s(NOTHING, group)
    assert found[0] == pytest.approx(1e12 * dummy, abs=1) and 0 < found[0] <= found[1]
    beside = sum(model._bytes[part] for part in ("attention", "mlp", "shared experts"))
    assert dummy > beside / (8e12 * GB200["memory_share"]) + 225 * GB200["far_meeting_s"]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TOPOLOGIES), works)
def test_a_step_with_prompts_takes_a_whole_forward_and_longer_than_its_decodes(name, one):
    for how in ({}, SPECULATING):
        model = StepModel(GB200, name, **how)
        both, group = model.rank_ps(group_of(model, one))[0], Work(*(model.shape.data * count for count in one))
        assert both >= model.rank_ps(group_of(model, replace_prompts(one)))[0]
        if one.prefill_tokens:
            assert both == round(1e12 * model.forward_s(one, group))


@given(st.integers(1, 64))
def test_guesses_make_a_step_longer_and_a_token_quicker(decodes):
    one = work(decodes, decodes * 146_000)
    plain, guessing = StepModel(GB200, "TP4"), StepModel(GB200, "TP4", **SPECULATING)
    assert guessing.forward_s(one, one) > plain.forward_s(one, one)
    assert guessing.forward_s(one, one) - sum(guessing.parts(one, 5 * decodes, 5).values()) == pytest.approx(guessing.draft_s(one, decodes))
    same = StepModel(GB200, "TP4", draft_tokens=4)  # of which none is right: each token takes a whole step
    assert guessing.rank_ps([one])[0] * 3.33 == pytest.approx(same.rank_ps([one])[0], rel=1e-3)


@given(st.integers(0, 40_000), st.integers(0, 10**10))
def test_what_moves_pays_for_pieces_and_bytes(pieces, nbytes):
    model = StepModel(GB200, "TP4")
    assert model.transfer_ps(pieces, nbytes) == pytest.approx(1e12 * (pieces * GB200["copy_s"] + nbytes / 9e11), abs=2)
    assert model.retrieve_ps(nbytes) == pytest.approx(1e12 * nbytes / GB200["retrieve_bytes_s"], abs=2)
    assert model.hand_over_ps == 0 and model.index_topk == 2048


def test_parts_have_the_names_of_a_profile_and_add_up_to_the_forward():
    model, chunk = StepModel(GB200, "DEP8"), work(prefill=3844, prefix=165_888)
    group = Work(*(8 * count for count in chunk))
    parts = model.parts(chunk, 8 * 3844)
    assert tuple(parts) == PARTS and model.forward_s(chunk, group) == pytest.approx(sum(parts.values()))


def test_a_constant_that_is_changed_changes_what_hangs_on_it_and_says_so():
    slow = GB200.but(copy_s=1e-3)
    assert slow.constants["copy_s"].label == "assumed" and replace(slow, constants=GB200.constants) == GB200
    assert StepModel(slow, "TP4").transfer_ps(1, 0) == 10**9
