package client

import (
	"context"
	"net/http"

	"iserd.org/iserd/api"
)

// SetNodes changes settings of records. They count from the next login on.
func (c *Client) SetNodes(ctx context.Context, r api.SettingsRequest) (out api.NodesReply, err error) {
	return out, c.call(ctx, http.MethodPost, "nodes/set", r, &out)
}

// SetNodeSecret stores a secret for records, or removes it when it is empty.
func (c *Client) SetNodeSecret(ctx context.Context, r api.SecretRequest) (out api.NodesReply, err error) {
	return out, c.call(ctx, http.MethodPost, "nodes/secret", r, &out)
}

// Portals lists how portals are asked for their targets.
func (c *Client) Portals(ctx context.Context) (out api.PortalsReply, err error) {
	return out, c.call(ctx, http.MethodGet, "portals", nil, &out)
}

// SetPortal changes how a portal is asked.
func (c *Client) SetPortal(ctx context.Context, r api.SettingsRequest) (out api.PortalsReply, err error) {
	return out, c.call(ctx, http.MethodPost, "portals/set", r, &out)
}

// SetPortalSecret stores a secret for discoveries at a portal, or removes it when it is empty.
func (c *Client) SetPortalSecret(ctx context.Context, r api.SecretRequest) (out api.PortalsReply, err error) {
	return out, c.call(ctx, http.MethodPost, "portals/secret", r, &out)
}

// DeletePortal forgets how a portal is asked, secrets included.
func (c *Client) DeletePortal(ctx context.Context, portal string) (out api.PortalsReply, err error) {
	return out, c.call(ctx, http.MethodPost, "portals/delete", api.NodeFilter{Portal: portal}, &out)
}

// Firmware reads what the firmware has booted from.
func (c *Client) Firmware(ctx context.Context, r api.FirmwareRequest) (out api.FirmwareReply, err error) {
	return out, c.call(ctx, http.MethodPost, "firmware", r, &out)
}
