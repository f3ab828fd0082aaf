package records

import (
	"fmt"

	"iserd.org/iserd/api"
)

// PortalKey returns the key of the record that says how a portal is asked for its targets: one without a target.
func PortalKey(p api.Portal) Key {
	return Key{Address: p.Address, Port: p.Port, Interface: defaultFace}
}

// OpenPortals reads the records in dir that say how portals are asked for their targets. They are as those of targets, but Merge is not for them.
func OpenPortals(dir string) (*Nodes, error) { return openNodes(dir, osFiles{}, checkPortalKey) }

func checkPortalKey(k Key) error {
	if k.Target != "" {
		return fmt.Errorf("a portal's record names target %q", k.Target)
	}
	p, err := api.ParsePortal(k.Portal().String())
	if err != nil {
		return err
	}
	if k != PortalKey(p) {
		return fmt.Errorf("address %q is not in its normal form %q", k.Address, p.Address)
	}
	return nil
}
