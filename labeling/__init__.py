"""Wing 1: step labels from people, a strong model, and rollouts."""
