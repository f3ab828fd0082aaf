// Package discovery asks targets what they offer: SendTargets over TCP and over RDMA (RFC 7143 section 4.3 and appendix C).
//
// It belongs to the control plane. Each discovery is a session of its own that ends with a logout; nothing of it reaches the data plane.
// What comes back are plain records whose names and addresses were checked, so that they may be stored and printed.
//
// A Linux target lists only the portals of the transport that the question came over. Whoever wants to see all must ask both ways.
package discovery
