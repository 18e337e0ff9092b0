"""What happens between steps: console, writers, saving, early stopping, guard, signals. All behind `loop.Hook`."""
