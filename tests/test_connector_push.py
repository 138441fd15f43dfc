"""push_layers: rows that a prefill worker writes while it computes, and everything that can come in between."""
import pytest

from minengine.disagg.source import Notice, Reserve
from minengine.request import Status
from gated import Gated
from test_connector_faults import Hand, heard
from test_engine import alone, assert_same, prompt
from workers import prefilled, pushed, so_far, workers

IDS = prompt(199, 60, 1)


def pair(**more):
    return workers(**{"agent": "shm", "wrap": Gated, "kv_transfer": "push_layers", **more})


def reserve(p, d, name="r", ids=IDS):
    """(the decoder's request, the target that it tells)."""
    request = d.add(name, ids, source=Reserve(p.connector.facts))
    d.until(lambda: d.reserved)
    return request, d.reserved.pop()[1]


def check_answer(p, d, name="r", length=60, family=1):
    assert_same(p.tokens(name) + d.tokens(name), *alone("llama", "float32", length, family, 8))


def hold(p, name="r"):
    p.until(lambda: name in p.scheduler.held)
    assert p.connector.hold(name) is None


def test_each_layer_is_on_its_way_before_the_next_chunk_is_computed():
    with pair(max_num_batched_tokens=16, agent="nixl") as (p, d):
        request, target = reserve(p, d)
        p.connector.push_to("r", target)
        written = []
        write = p.connector.io.write_rows
        p.connector.io.write_rows = lambda target, table, start, stop, layers, planes: (
            written.append((start, stop, layers and list(layers))), write(target, table, start, stop, layers, planes))[1]
        p.add("r", IDS, hold=True)
        while "r" not in p.scheduler.held:
            at = p.engine.requests["r"].num_computed_tokens
            p.turn()
            p.until(lambda: sum(layers.count(2) for start, stop, layers in written if start == at and layers) == 1, turn=False)
        hold(p)
        d.connector.resume("r", so_far(p, "r"))
        d.until(lambda: d.finished("r"))
        check_answer(p, d)
        for start in (0, 16, 32, 48):  # each row of each layer once
            assert sorted(layer for at, _, layers in written for layer in layers or () if at == start) == [0, 1, 2]
        p.clean(), d.clean()


def test_steps_that_call_no_hook_are_pushed_at_the_end():
    """As those that a CUDA graph replays."""
    with pair(max_num_batched_tokens=16) as (p, d):
        p.engine.runner.on_layer = None
        assert_same(pushed(p, d, "r", IDS), *alone("llama", "float32", 60, 1, 8))
        p.clean(), d.clean()


@pytest.mark.parametrize("kind, vocab", [("llama", 199), ("glm", 211)])
def test_a_cached_prefix_is_pushed_too_and_what_the_decoder_has_is_not(kind, vocab):
    with pair(kind=kind, wrap=lambda agent: agent) as (p, d):
        p.add("warm", prompt(vocab, 95, 1), 1)
        p.until(lambda: p.finished("warm"))
        ids = prompt(vocab, 95, 1)
        assert_same(pushed(p, d, "cached on one side", ids), *alone(kind, "float32", 95, 1, 8))
        assert p.connector.take_facts()[-1].num_tokens == 95
        assert_same(pushed(p, d, "on both", ids), *alone(kind, "float32", 95, 1, 8))
        assert p.connector.take_facts()[-1].num_tokens == 95 - 80
        p.clean(), d.clean()


def test_a_step_that_raises_and_a_prefill_that_is_preempted_push_the_right_rows():
    with pair(max_num_batched_tokens=32, prefill=dict(num_gpu_blocks_override=9)) as (p, d):
        p.add("older", prompt(199, 33, 5), 60)
        p.until(lambda: "older" in p.outputs)
        ids = prompt(199, 90, 1)
        request, target = reserve(p, d, ids=ids)
        p.connector.push_to("r", target)
        p.add("r", ids, hold=True)
        p.turn()
        model = p.engine.runner.model
        p.engine.runner.model = type("Broken", (), {"forward": lambda self, batch, kv, on_layer: (on_layer(0, batch), 1 / 0)})()
        with pytest.raises(ZeroDivisionError):
            p.turn()
        p.engine.runner.model = model
        p.until(lambda: "r" in p.scheduler.held)
        hold(p)
        d.connector.resume("r", so_far(p, "r"))
        d.until(lambda: d.finished("r"))
        assert_same(p.tokens("r") + d.tokens("r"), *alone("llama", "float32", 90, 1, 8))
        p.until(lambda: p.finished("older"))
        p.clean(), d.clean()


def test_a_preempted_prefill_does_not_lose_rows_that_are_being_written():
    """The writes wait while the request loses its blocks, others fill them, and it is computed again."""
    with pair(max_num_batched_tokens=8, max_num_seqs=2, prefill=dict(num_gpu_blocks_override=8)) as (p, d):
        p.add("older", prompt(199, 62, 5), 40)
        p.until(lambda: "older" in p.outputs)
        request, target = reserve(p, d)
        p.agent.shut = {"WRITE"}
        p.connector.push_to("r", target)
        mine = p.add("r", IDS, hold=True)
        p.until(lambda: mine.timeline.num_preemptions or "r" in p.scheduler.held)
        assert mine.timeline.num_preemptions
        p.until(lambda: p.finished("older"))
        p.agent.shut = set()
        hold(p)
        d.connector.resume("r", so_far(p, "r"))
        d.until(lambda: d.finished("r"))
        check_answer(p, d)
        p.clean(), d.clean()


# --- a decoder that gives up ------------------------------------------------------------------------------------------

def test_an_aborted_reservation_is_out_of_use_until_the_writer_has_stopped():
    with pair() as (p, d):
        request, target = reserve(p, d)
        blocks = set(request.block_ids)
        p.agent.shut = {"WRITE"}
        p.connector.push_to("r", target)
        p.add("r", IDS, hold=True)
        p.until(lambda: p.agent.put_off)
        d.engine.abort_request("r")
        assert set(*d.scheduler.loads.quarantine.values()) == blocks
        d.add("other", prompt(199, 70, 3), 8)
        d.until(lambda: d.finished("other"))
        assert d.scheduler.loads.quarantine  # the write is still under way
        p.agent.shut = set()
        d.until(lambda: not d.scheduler.loads.quarantine)
        assert_same(d.tokens("other"), *alone("llama", "float32", 70, 3, 8))
        hold_or_end(p)
        p.clean(), d.clean()
        assert p.connector.take_facts()[0].error == "the decoder has called it off"


def hold_or_end(p, name="r"):
    """What a worker's loop does: hold what is held; the front lets it go."""
    p.until(lambda: name in p.scheduler.held)
    p.connector.hold(name)
    p.connector.release(name)


def test_a_reservation_called_off_before_its_prefill_came_is_never_written_to():
    with pair() as (p, d):
        request, target = reserve(p, d)
        d.engine.abort_request("r")
        d.clean()  # the writer has answered, though it knew nothing of it
        assert p.connector.push_to("r", target) is False
        p.add("r", IDS, hold=True)
        p.until(lambda: "r" in p.scheduler.held)
        assert p.connector.hold("r") is not None
        p.connector.release("r")
        p.clean()
        assert not p.connector.take_facts()


def test_a_request_that_waits_for_room_on_the_decoder_can_be_aborted():
    with pair(decode=dict(num_gpu_blocks_override=8)) as (p, d):
        d.add("large", prompt(199, 100, 3), 20)
        d.until(lambda: "large" in d.outputs)
        request = d.add("r", IDS, source=Reserve(p.connector.facts))
        d.turn()
        assert request.status is Status.WAITING and not d.reserved
        d.engine.abort_request("r")
        d.until(lambda: d.finished("large"))
        d.clean()


# --- a writer that fails, or stands still -----------------------------------------------------------------------------

@pytest.mark.parametrize("admission", ["poll", "event"])
def test_a_writer_that_stands_still_is_not_waited_for_and_may_go_on_later(admission):
    with pair(decode=dict(clock=Hand(), load_admission=admission, num_gpu_blocks_override=14)) as (p, d):
        request, target = reserve(p, d)
        blocks = set(request.block_ids)
        p.connector.push_to("r", target)
        p.agent.shut = {"WRITE"}
        p.add("r", IDS, hold=True)
        hold(p)
        p.agent.notifications, real = lambda: [], p.agent.notifications  # it does not hear either
        d.connector.resume("r", so_far(p, "r"))
        d.until(lambda: d.connector._moving[0].deadline_s is not None, turn=False)
        d.engine.clock.now += 61
        d.until(lambda: d.finished("r"))
        check_answer(p, d)
        assert set(*d.scheduler.loads.quarantine.values()) == blocks and d.engine.num_free_blocks == 14 - len(blocks)
        d.add("other", prompt(199, 70, 3), 8)
        d.until(lambda: d.finished("other"))
        p.agent.shut, p.agent.notifications = set(), real
        d.clean()
        assert_same(d.tokens("other"), *alone("llama", "float32", 70, 3, 8))
        p.clean()


def test_a_push_that_fails_is_computed_by_the_decoder_after_the_first_token():
    with pair() as (p, d):
        request, target = reserve(p, d)
        p.agent.fail = {"WRITE"}
        p.connector.push_to("r", target)
        p.add("r", IDS, hold=True)
        p.until(lambda: "r" in p.scheduler.held)
        d.until(lambda: d.connector._moving[0].broken)
        assert not d.outputs and request.status is Status.LOADING  # the token may have been sent: nothing is computed before it is known
        p.connector.hold("r")
        d.connector.resume("r", so_far(p, "r"))
        d.until(lambda: d.finished("r"))
        check_answer(p, d)
        p.connector.release("r")
        p.clean(), d.clean()


@pytest.mark.parametrize("told", [True, False])
def test_a_dead_writer(told):
    """Killed before or after its first token was sent: no token is lost, none comes twice."""
    with pair() as (p, d):
        request, target = reserve(p, d)
        p.connector.push_to("r", target)
        p.agent.shut = {"WRITE"}
        p.add("r", IDS, hold=True)
        p.until(lambda: "r" in p.scheduler.held)
        p.connector.close()
        p.agent.close()
        d.connector.peer_gone(p.agent.name)
        assert d.connector.fail("r", so_far(p, "r") if told else None)
        d.until(lambda: d.finished("r"))
        assert_same((p.tokens("r") if told else []) + d.tokens("r"), *alone("llama", "float32", 60, 1, 8))
        d.clean()


def test_a_prefill_that_ends_early_tells_the_decoder():
    """Aborted on the prefill worker, or finished by its first token."""
    with pair() as (p, d):
        for name in ("aborted", "finished"):
            request, target = reserve(p, d, name)
            p.connector.push_to(name, target)
            p.agent.shut = {"WRITE"} if name == "aborted" else set()
            p.add(name, IDS, 1 if name == "finished" else 8, hold=True)
            p.turn()
            if name == "aborted":
                p.engine.abort_request(name)
            p.agent.shut = set()
            d.until(lambda: not d.connector._moving or d.connector._moving[0].broken or d.connector._moving[0].rows_are_there)
            d.engine.abort_request(name)
            p.clean(), d.clean()


def test_a_stop_for_an_unknown_reservation_and_notices_twice_are_harmless():
    with pair() as (p, d):
        pushed(p, d, "before", prompt(199, 33, 2))
        request, target = reserve(p, d)
        for notice in (Notice("push", target.reservation + 1), Notice("fail", target.reservation + 1), Notice("fetch", 5)):
            p.agent.notify(d.agent.name, notice.encode())
        heard(d, None, p)
        assert request.status is Status.LOADING
        p.connector.push_to("r", target)
        p.agent.kept = []
        p.add("r", IDS, hold=True)
        hold(p)
        d.connector.resume("r", so_far(p, "r"))
        p.until(lambda: p.agent.kept)
        p.agent.kept *= 2
        p.agent.deliver()
        d.until(lambda: d.finished("r"))
        assert d.connector.resume("r", so_far(p, "r")) is False and d.connector.fail("r") is False
        check_answer(p, d)
        p.clean(), d.clean()


def test_one_worker_can_push_to_two_and_be_held_by_others():
    with pair() as (p, d), pair() as (_, other):
        targets = []
        for worker, name, family in ((d, "a", 1), (other, "b", 2)):
            worker.add(name, prompt(199, 60, family), source=Reserve(p.connector.facts))
            worker.until(lambda: worker.reserved)
            targets.append((name, worker.reserved.pop()[1]))
        for family, (name, target) in enumerate(targets, 1):
            p.connector.push_to(name, target)
            p.add(name, prompt(199, 60, family), hold=True)
        source, resume = prefilled(p, "c", prompt(199, 40, 3))
        d.add("c", prompt(199, 40, 3), resume=resume, source=source)
        for name in "ab":
            hold(p, name)
        d.connector.resume("a", so_far(p, "a")), other.connector.resume("b", so_far(p, "b"))
        d.until(lambda: d.finished("a") and d.finished("c"))
        other.until(lambda: other.finished("b"))
        check_answer(p, d, "a"), check_answer(p, other, "b", 60, 2), check_answer(p, d, "c", 40, 3)
        p.clean(), d.clean(), other.clean()
