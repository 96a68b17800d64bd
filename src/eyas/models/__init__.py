"""What is computed: targets, the draft, vocabulary maps, checkpoints."""
