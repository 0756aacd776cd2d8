"""How update frequency trades against samples: fits, critical batch sizes, batch schedules."""
