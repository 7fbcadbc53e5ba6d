"""Worker processes: reuse, results, and what a failing, dying or hanging rank looks like."""

import os
import signal
import threading
import warnings

import pytest
import torch
import torch.distributed as dist

from hybridcp.testing import DistributedTestError, WorkerPool, run_distributed


def pid_of_rank():
    return dist.get_rank(), os.getpid()


def sum_of_ranks(x):
    x = x + dist.get_rank()
    dist.all_reduce(x)
    return x[1:]


def ring_of_views(count):
    """Sends to the right as often as asked; the slowest rank must not be cut off."""
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = []
    block = torch.full((4,), rank, dtype=torch.bfloat16)
    for _ in range(count):
        received = torch.empty_like(block)
        works = [
            dist.isend(block, group_dst=(rank + 1) % size),
            dist.irecv(received, group_src=(rank - 1) % size),
        ]
        for work in works:
            work.wait()
        block = received
        seen.append(int(block[0]))
    return seen


def fail_on(bad_rank):
    if dist.get_rank() == bad_rank:
        raise KeyError("the real reason")
    dist.all_reduce(torch.ones(1))


def fail_while_others_sleep(bad_rank):
    if dist.get_rank() == bad_rank:
        raise KeyError("the real reason")
    threading.Event().wait()


def sleep_on(lazy_rank):
    if dist.get_rank() == lazy_rank:
        threading.Event().wait()
    dist.barrier()


def die_on(bad_rank, number):
    if dist.get_rank() == bad_rank:
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(1))


def leave_on(bad_rank):
    if dist.get_rank() == bad_rank:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def settings():
    return {
        "threads": torch.get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "rank": os.environ["RANK"],
        "world": os.environ["WORLD_SIZE"],
        "random": torch.rand(1).item(),
        "leaked": os.environ.get("LEAKED"),
    }


def leak():
    os.environ["LEAKED"] = "yes"
    torch.rand(7)


def warn():
    warnings.warn("careful", UserWarning, stacklevel=1)


def unpicklable():
    return threading.Lock()


def test_runs_in_the_same_processes_again(run_distributed):
    first = run_distributed(pid_of_rank, 4)
    second = run_distributed(pid_of_rank, 3)
    assert [rank for rank, _ in first] == [0, 1, 2, 3]
    assert second == first[:3]
    assert os.getpid() not in {pid for _, pid in first}


def test_returns_tensors_in_rank_order(run_distributed):
    results = run_distributed(sum_of_ranks, 3, torch.arange(4))
    for result in results:
        torch.testing.assert_close(result, torch.tensor([6, 9, 12]))


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_group_sizes(run_distributed, world_size):
    if world_size == 1:
        assert run_distributed(pid_of_rank, 1)[0][0] == 0
        return
    results = run_distributed(ring_of_views, world_size, world_size - 1)
    for rank, seen in enumerate(results):
        assert seen == [(rank - hop) % world_size for hop in range(1, world_size)]


def test_workers_are_alike_in_every_run(run_distributed):
    before = run_distributed(settings, 2)
    run_distributed(leak, 2)
    assert run_distributed(settings, 2) == before
    assert [found["rank"] for found in before] == ["0", "1"]
    assert before[0]["random"] == before[1]["random"]
    assert (before[0]["threads"], before[0]["omp"], before[0]["world"]) == (1, "1", "2")


def test_reports_the_failing_rank_first(run_distributed):
    with pytest.raises(DistributedTestError) as caught:
        run_distributed(fail_on, 4, 2)
    failures = caught.value.failures
    assert failures[0].rank == 2 and not failures[0].consequence
    assert all(failure.consequence for failure in failures[1:])
    message = str(caught.value)
    assert message.startswith("fail_on failed on ")
    assert "── rank 2: KeyError: 'the real reason'\nTraceback" in message
    assert "in fail_on" in message and "worker.py" not in failures[0].details


def test_stops_ranks_that_do_not_notice_a_failure(run_distributed):
    with pytest.raises(DistributedTestError) as caught:
        run_distributed(fail_while_others_sleep, 2, 1)
    first, second = caught.value.failures
    assert (first.rank, first.consequence) == (1, False)
    assert (second.rank, second.consequence) == (0, True)
    assert "in fail_while_others_sleep" in second.details


def test_kills_a_hanging_run_and_goes_on(run_distributed):
    before = run_distributed(pid_of_rank, 2)
    with pytest.raises(DistributedTestError) as caught:
        run_distributed(sleep_on, 2, 1, timeout=1)
    assert [failure.rank for failure in caught.value.failures] == [0, 1]
    for failure in caught.value.failures:
        assert failure.summary.startswith("not done in 1 s")
        assert "in sleep_on" in failure.details
    after = run_distributed(pid_of_rank, 2)
    assert not {pid for _, pid in after} & {pid for _, pid in before}


@pytest.mark.parametrize("name", ["SIGKILL", "SIGFPE"])
def test_names_the_signal_of_a_dead_rank(run_distributed, name):
    with pytest.raises(DistributedTestError) as caught:
        run_distributed(die_on, 3, 1, signal.Signals[name])
    first = caught.value.failures[0]
    assert (first.rank, first.summary) == (1, f"died with {name}")
    if name == "SIGFPE":
        assert "in die_on" in first.details
    assert len(run_distributed(pid_of_rank, 3)) == 3


def test_names_the_exit_code_of_a_rank_that_left(run_distributed):
    with pytest.raises(DistributedTestError) as caught:
        run_distributed(leave_on, 2, 0)
    assert caught.value.failures[0].summary == "exited with code 7"


def test_replaces_an_idle_worker_that_died(run_distributed):
    [(_, pid)] = run_distributed(pid_of_rank, 1)
    os.kill(pid, signal.SIGKILL)
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
    [(_, new_pid)] = run_distributed(pid_of_rank, 1)
    assert new_pid != pid


def test_warnings_count_as_in_the_caller(run_distributed):
    with pytest.raises(DistributedTestError, match="UserWarning: careful"):
        run_distributed(warn, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_distributed(warn, 1) == [None]


def test_a_result_that_cannot_travel_is_an_error(run_distributed):
    with pytest.raises(DistributedTestError, match="cannot pickle"):
        run_distributed(unpicklable, 1)


def test_refuses_functions_that_a_worker_cannot_find(run_distributed):
    with pytest.raises(TypeError, match="top level of a module"):
        run_distributed(lambda: None, 1)
    with pytest.raises(ValueError, match="world_size must be ≥ 1, got 0"):
        run_distributed(pid_of_rank, 0)


def test_a_pool_of_its_own_leaves_no_process():
    [(_, pid)] = run_distributed(pid_of_rank, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with WorkerPool() as pool:
        assert len(pool.run(pid_of_rank, 2)) == 2
