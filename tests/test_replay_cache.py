"""Sessions against caches: by hand on small ones, and on the shipped traces that more room and better routing never find fewer blocks."""
import pytest

from minengine.simulate.replay_cache import Chains, num_unique_blocks, replay_cache
from minengine.workload.traces import SHIPPED, Session, Subagent, TraceRequest, hit_share, read_agentx


def turn(*hash_ids, start_s=0.0, api_time_s=1.0, size=4, extra=1, out=1):
    return TraceRequest(start_s, len(hash_ids) * size + extra, out, hash_ids, size, api_time_s)


def session(name, *items):
    return Session(name, 4, items)


def one_worker(*sessions, **options):
    return replay_cache(list(sessions), workers=1, start_within_s=0.0, **options)


CHAT = session("a", turn(1, 2), turn(1, 2, 3, start_s=2), turn(1, 2, 3, 4, start_s=4))


def test_every_turn_finds_the_last_ones_blocks():
    result = one_worker(CHAT)
    assert (result.blocks, result.device_hits, result.host_hits) == (9, 0 + 2 + 3, 0)
    assert (result.requests, result.asked, result.computed) == ([3], [9], [4])
    assert result.hit_rate == result.device_hit_rate == hit_share([CHAT.requests]) == 5 / 9
    assert result.most_in_flight == 1 and result.waited == 0


def test_the_last_token_is_always_computed():
    exact = session("a", turn(1, 2, extra=0), turn(1, 2, extra=0, start_s=2))
    assert one_worker(exact).device_hits == 1, "the second block holds the last token"


def test_equal_ids_after_different_pasts_and_in_different_sessions_are_different_blocks():
    branches = session("a", turn(1, 2), turn(3, 2, start_s=2))
    assert one_worker(branches).device_hits == 0 and num_unique_blocks([branches]) == 4
    assert one_worker(CHAT, session("b", *CHAT.items)).device_hits == 10 and num_unique_blocks([CHAT, session("b", *CHAT.items)]) == 8


def test_what_does_not_fit_is_forgotten_and_a_tier_keeps_it():
    # Two sessions take turns in a cache for one of them: 4 blocks of the prompt and 1 of output.
    a = session("a", turn(1, 2, 3, 4), turn(1, 2, 3, 4, start_s=4))
    b = session("b", turn(1, 2, 3, 4, start_s=2), turn(1, 2, 3, 4, start_s=6))
    b = session("b", turn(9, start_s=0, api_time_s=0.0), *b.items)
    alone = one_worker(a, b, blocks_each=5)
    assert alone.device_hits < 8
    with_tier = one_worker(a, b, blocks_each=5, host_blocks=100)
    assert with_tier.device_hits == alone.device_hits and with_tier.device_hits + with_tier.host_hits == 8
    assert with_tier.computed == [9]
    assert one_worker(a, b, blocks_each=5, host_blocks=1).host_hits < with_tier.host_hits, "the tier has its own room"


def test_a_request_without_room_waits_for_it():
    a, b = session("a", turn(1, 2, 3, 4)), session("b", turn(1, 2, 3, 4))
    result = one_worker(a, b, blocks_each=6)
    assert result.waited == 1 and result.most_in_flight == 2
    with pytest.raises(ValueError, match="blocks_each=4: a request of these sessions takes 5"):
        one_worker(a, b, blocks_each=4)
    with pytest.raises(ValueError, match="sessions: is empty"):
        one_worker()


def test_agents_of_a_session_run_side_by_side_and_stay_together_or_not():
    tree = session("a", turn(1, api_time_s=100.0), Subagent("helper", 10.0, 20.0, (turn(7, 8, start_s=10.0), turn(7, 8, 9, start_s=20.0))))
    result = one_worker(tree)
    assert result.most_in_flight == 2 and result.device_hits == 2
    assert sorted(replay_cache([tree], workers=2).requests) == [1, 2], "a helper's prompt is nowhere: it is computed where there is less to do"
    kept = [replay_cache([tree], "random", sticky=True, workers=2, seed=seed).requests for seed in range(4)]
    apart = [replay_cache([tree], "random", sticky=True, workers=2, seed=seed, by_agent=True).requests for seed in range(8)]
    assert all(sorted(requests) == [0, 3] for requests in kept) and any(sorted(requests) == [1, 2] for requests in apart)


def test_equal_seeds_are_equal_replays_and_hashes_can_be_kept():
    sessions, chains = list(read_agentx(SHIPPED / "agentx")), Chains()
    first = replay_cache(sessions, seed=3)
    assert first == replay_cache(sessions, seed=3, chains=chains) == replay_cache(sessions, seed=3, chains=chains)


@pytest.mark.parametrize("policy", ["random", "round_robin", "kv_aware"])
def test_on_the_shipped_traces_more_room_finds_more_and_none_more_than_the_ideal(policy):
    sessions = list(read_agentx(SHIPPED / "agentx"))
    longest = max(-(-(r.input_tokens + r.output_tokens) // r.block_size) for s in sessions for r in s.requests)
    ideal = hit_share([s.requests for s in sessions])
    small, large = replay_cache(sessions, policy, blocks_each=longest + 1), replay_cache(sessions, policy)
    tiered = replay_cache(sessions, policy, blocks_each=longest + 1, host_blocks=num_unique_blocks(sessions))
    assert small.hit_rate <= large.hit_rate <= ideal + 1e-9
    assert tiered.hit_rate == pytest.approx(ideal, abs=0.01) and tiered.host_hits > 0 or small.hit_rate == pytest.approx(ideal, abs=0.01)
    if policy == "kv_aware":
        assert large.hit_rate == pytest.approx(ideal, abs=0.01), "a session that stays finds all that it had"
        assert large.hit_rate > replay_cache(sessions, "random").hit_rate
