"""Entry point of a tier's processes: `python -m afore_kernels.runtime.entry ROLE CONTROL_FD`.

The roles' modules are imported, never run as `__main__`: compiled code is cached under the module's
name.
"""

import sys

from afore_kernels.runtime.processes import run_child

if __name__ == "__main__":
    role, control_fd = sys.argv[1], int(sys.argv[2])
    if role == "scheduler":
        from afore_kernels.runtime.scheduler import main
    else:
        from afore_kernels.runtime.worker_process import main
    run_child(role, control_fd, main)
