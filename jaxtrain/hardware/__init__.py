"""What the machine has: devices, unused GPUs, memory, the compiler options that each backend wants."""
