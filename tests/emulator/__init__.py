"""A CUDA emulator for our kernels: the same headers compiled by g++, every CUDA thread a fiber (issue 3 point 3).

From below: ``cpu_fiber.h`` (stacks, context switch), ``cpu_sched.h`` (random, seeded schedules of threads, warps,
blocks, clusters), ``cpu_sync.h`` (collectives, barriers), ``cpu_async.h`` (mbarriers, asynchronous copies, dependent
launch), ``cpu_launch.h``, ``cuda_cpu.h`` and ``cuda_math.h`` (CUDA's names), ``server.h`` (the process: each tensor in
an allocation of its own). ``runner.cpp`` has the real kernels, ``selftest.*`` small ones that prove the emulator. In
Python: ``build`` compiles, ``process`` talks, ``args`` packs a Call, ``emulated`` is the backend-like front, ``cases``
the calls to check, ``mutants`` and ``kernel_mutants`` the planted faults.

What it does not model: weak memory order (fences do nothing but allow a switch), speed, and what the compiler makes of
a data race.
"""
