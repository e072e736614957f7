"""The network behind one interface: libp2p's daemon, calls and streams, blobs, the DHT."""
