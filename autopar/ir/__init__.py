"""What the compiler talks about: programs, meshes, shardings, schedules, and how they print."""
