"""Starting the processes of a run: torchrun command lines and the launchers that run them."""
