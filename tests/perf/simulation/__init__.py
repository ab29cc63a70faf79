"""Which defaults hold on which workload: the real scheduler on a simulated device and clock."""
