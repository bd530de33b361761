"""Peers: what people do without this project, a script each, to read and to measure ours against.

    crucible train run=peer run.peer=loop_compile experiment=gpt2 trainer.val_every_n_steps=0

``loop`` (eager, ``torch.compile``, reduce-overhead), ``loop_captured``, ``lightning_trainer``, ``accelerate_regional``
and ``transformers_trainer`` each train, from top to bottom; ``work`` holds what they are given, ``job`` the run around
one.
"""
