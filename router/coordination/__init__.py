"""What a router does at intervals, beside its requests, so that routing chooses well.

Routers of one fleet, and the workers of one router, exchange their load and the prompts that they
have sent (peers.py, exchange.py). Engines of both roles get the role that the traffic needs
(role_balance.py), and autoscalers learn how many engines are needed (demand.py).
"""
