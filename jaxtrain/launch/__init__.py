"""Starting the processes of one run."""
