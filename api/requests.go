package api

// SettingsRequest changes settings: of the records that Target and Portal select, or, for discoveries, of Portal alone.
type SettingsRequest struct {
	Target string            `json:"target"`
	Portal string            `json:"portal"`
	Set    map[string]string `json:"set"`   // by the names of SettingTable
	Unset  []string          `json:"unset"` // back to the default
}

// MovedTo is a name for Unset: it forgets the portal to which a target has moved.
const MovedTo = "moved_to"

// SecretRequest stores one secret, or removes it when it is empty. Records are selected as in SettingsRequest.
type SecretRequest struct {
	Target string `json:"target"`
	Portal string `json:"portal"`
	Name   string `json:"name"` // CHAPSecret or CHAPTargetSecret
	Secret Secret `json:"secret"`
}

// PortalRecord says how a portal is asked for its targets.
type PortalRecord struct {
	Address  string   `json:"address"`
	Port     uint16   `json:"port"`
	Settings Settings `json:"settings"`
	Secrets  []string `json:"secrets"` // names of those that are stored
}

// Portal returns the record's portal.
func (r *PortalRecord) Portal() Portal { return Portal{r.Address, r.Port} }

// PortalsReply lists how portals are asked.
type PortalsReply struct {
	Version  int            `json:"version"`
	Portals  []PortalRecord `json:"portals"`
	Problems []string       `json:"problems"`
}

// FirmwareRequest reads what the firmware has booted from, and stores it on demand.
type FirmwareRequest struct {
	Save bool `json:"save"`
}

// FirmwareReply is the iSCSI Boot Firmware Table.
type FirmwareReply struct {
	Version       int              `json:"version"`
	InitiatorName string           `json:"initiator_name"` // the firmware's, "" when it has none
	NICs          []FirmwareNIC    `json:"nics"`
	Targets       []FirmwareTarget `json:"targets"`
	Notes         []string         `json:"notes"`
}

// FirmwareNIC is a network interface as the firmware has set it up.
type FirmwareNIC struct {
	Index        int      `json:"index"`
	Boot         bool     `json:"boot"` // the firmware has booted through it
	MAC          string   `json:"mac"`
	Address      string   `json:"address,omitempty"`
	PrefixLength int      `json:"prefix_length,omitempty"`
	Gateway      string   `json:"gateway,omitempty"`
	DNS          []string `json:"dns,omitempty"`
	DHCP         string   `json:"dhcp,omitempty"` // server
	VLAN         int      `json:"vlan,omitempty"`
	Hostname     string   `json:"hostname,omitempty"`
	Interface    string   `json:"interface,omitempty"` // of this host, with that MAC address
}

// FirmwareTarget is a target that the firmware knows.
type FirmwareTarget struct {
	Index   int      `json:"index"`
	Boot    bool     `json:"boot"`
	Target  string   `json:"target"`
	Address string   `json:"address"`
	Port    uint16   `json:"port"`
	LUN     int      `json:"lun"`  // -1: the kernel's text of it cannot be read with certainty
	NIC     int      `json:"nic"`  // index of the interface
	Auth    string   `json:"auth"` // none, chap, mutual chap
	User    string   `json:"chap_user,omitempty"`
	Secrets []string `json:"secrets"` // names of those that the firmware has
	Saved   bool     `json:"saved"`
}
