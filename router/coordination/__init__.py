"""Periodic tasks of a router that give routing the state of other routers and of the fleet.

Routers of one fleet, and the workers of one router, exchange their load and the prompts that they
have sent (peers.py, exchange.py). Engines of both roles get the role that the traffic needs
(role_balance.py), and autoscalers learn how many engines are needed (demand.py).
"""
