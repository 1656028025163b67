"""A process of a worker of the race that is a job of its own, for steps by peers.

Started by `benches.race.team`.
"""

from multiprocessing.connection import Connection

from benches.race.jax_worker import STEP_DEADLINE, devices_per_worker, make_runner
from benches.race.turns import serve
from decentjax import distributed
from decentjax.distributed.place import check_per_worker
from train.job.distributed import fail_stop


def main() -> None:
    with fail_stop():
        count = devices_per_worker() // check_per_worker()
        distributed.initialize_worker(count, step_deadline=STEP_DEADLINE)
        serve(Connection(0), make_runner)


if __name__ == "__main__":
    main()
