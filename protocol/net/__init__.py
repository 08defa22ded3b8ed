"""How nodes and trainers talk: whole frames over authenticated streams (base), libp2p (p2p) or memory."""
