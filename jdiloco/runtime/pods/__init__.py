"""A node that is a pod."""
