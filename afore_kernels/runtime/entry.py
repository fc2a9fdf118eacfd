"""Entry point of a tier's processes: `python -m afore_kernels.runtime.entry CONTROL_FD`.

The roles' modules are imported, never run as `__main__`: compiled code is cached under the module's
name.
"""

import sys

from afore_kernels.runtime import scheduler, worker_process
from afore_kernels.runtime.precompile import precompile
from afore_kernels.runtime.processes import run_launcher

if __name__ == "__main__":
    precompile()
    run_launcher(int(sys.argv[1]), {"scheduler": scheduler.main, "worker": worker_process.main})
