"""What runs in the next step: admission, budgets, preemption. Plain Python, without arrays."""
