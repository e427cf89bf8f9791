"""Reinforcement learning with dense rewards: environments, policies, rollouts, reward shaping, warm start, PPO."""
