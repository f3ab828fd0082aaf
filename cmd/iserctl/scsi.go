package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"iserd.org/iserd/api"
	"iserd.org/iserd/scsi"
)

const unitUsage = "/dev/ublkbN|SESSION|TARGET"

// unitFlag is how commands name a logical unit: a device, or a session with --lun.
type unitFlag struct{ lun int }

func (u *unitFlag) add(c *cobra.Command) {
	c.Flags().IntVar(&u.lun, "lun", -1, "number of the logical unit, if a session is named")
}

// name checks what was said.
func (u *unitFlag) name(arg string) (api.UnitName, error) {
	if err := checkSession(arg); err != nil {
		return api.UnitName{}, err
	}
	n := api.UnitName{Name: arg}
	device := strings.HasPrefix(strings.TrimPrefix(arg, "/dev/"), "ublkb")
	switch {
	case device && u.lun >= 0:
		return n, api.Errorf(api.ErrInvalidArgs, "--lun: %s is one logical unit already", arg)
	case !device && (u.lun < 0 || u.lun > 0x3fff):
		return n, api.Errorf(api.ErrInvalidArgs, "--lun: give the number of a logical unit of the session, 0 to 16383")
	case !device:
		lun := uint16(u.lun)
		n.LUN = &lun
	}
	return n, nil
}

// statusError is the failure for a status that is not GOOD.
func statusError(r api.ScsiReply) error {
	name := api.ErrCommandFailed
	switch scsi.Status(r.Status) {
	case scsi.StatusGood:
		return nil
	case scsi.StatusReservationConflict:
		name = api.ErrReservationConflict
	}
	text := r.StatusName
	if r.SenseText != "" {
		text += ": " + r.SenseText
	}
	return api.Errorf(name, "the unit answers %s", text)
}

func (a *app) scsiRawCommand() *cobra.Command {
	var u unitFlag
	r := api.ScsiRequest{}
	out, save := "", ""
	c := &cobra.Command{
		Use: "raw " + unitUsage + " CDB", Short: "Send one SCSI command as it is",
		Long: "Send one SCSI command as it is, 6 to 16 bytes in hexadecimal, and show what the unit answers. Block devices of this kind have no SG_IO.\n" +
			"The exit status is 0 for GOOD, 33 for another status and 34 for RESERVATION CONFLICT. A command that changes the unit needs --force:\n" +
			"caches and mounted file systems do not see what it does.",
		Example: "  iserctl scsi raw /dev/ublkb0 120000006000 --in 96\n  iserctl scsi raw 1 --lun 3 'a0 00 00 00 00 00 00 00 10 00 00 00' --in 4096",
		Args:    exactly(2, "a device or session, or the command"),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if r.Unit, err = u.name(args[0]); err != nil {
				return err
			}
			if r.CDB, err = api.ParseHex(args[1]); err != nil {
				return err
			}
			if r.Out, err = readData(out); err != nil {
				return err
			}
			r.Timeout = a.seconds()
			reply, err := a.daemon().Scsi(cmd.Context(), r)
			if err != nil {
				return err
			}
			if save != "" {
				if err := os.WriteFile(save, reply.Data, 0o600); err != nil {
					return api.Errorf(api.ErrInvalidArgs, "--save: %w", err)
				}
			}
			switch {
			case a.json:
				err = a.print(reply)
			case save == "":
				err = dump(a.out, reply.Data)
			}
			if err != nil {
				return err
			}
			if reply.Residual != 0 && !a.json && reply.Status == 0 {
				a.warn("%s", residual(reply.Residual))
			}
			return statusError(reply)
		},
	}
	u.add(c)
	f := c.Flags()
	f.IntVar(&r.In, "in", 0, "bytes that the command may read, at most 524288")
	f.StringVar(&out, "out", "", "FILE with the data that the command writes, - for standard input")
	f.StringVar(&save, "save", "", "FILE for the data that was read, instead of showing it")
	f.BoolVar(&r.Force, "force", false, "send a command that changes the unit")
	f.BoolVar(&r.SkipAttention, "skip-attention", false, "send it again when it only met a unit attention")
	return c
}

// residual says what was not moved.
func residual(n int64) string {
	if n < 0 {
		return fmt.Sprintf("the unit had %d bytes more", -n)
	}
	return fmt.Sprintf("%d bytes fewer than were asked for", n)
}

// maxData is what one command moves, bytes.
const maxData = 512 << 10

// readData reads what a command writes.
func readData(file string) (api.Hex, error) {
	in := io.Reader(os.Stdin)
	switch file {
	case "":
		return nil, nil
	case "-":
	default:
		f, err := os.Open(file)
		if err != nil {
			return nil, api.Errorf(api.ErrInvalidArgs, "--out: %w", err)
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxData+1))
	switch {
	case err != nil:
		return nil, api.Errorf(api.ErrInvalidArgs, "--out: %w", err)
	case len(b) > maxData:
		return nil, api.Errorf(api.ErrInvalidArgs, "--out: more than %d bytes", maxData)
	case len(b) == 0:
		return nil, api.Errorf(api.ErrInvalidArgs, "--out: no data")
	}
	return b, nil
}

// dump shows bytes as hexadecimal digits and text.
func dump(w io.Writer, b []byte) error {
	d := hex.Dumper(w)
	_, err := d.Write(b)
	if err == nil {
		err = d.Close()
	}
	if err != nil {
		return api.Errorf(api.ErrInternal, "print: %w", err)
	}
	return nil
}

// ask sends a command that reads, and wants GOOD.
func (a *app) ask(ctx context.Context, unit api.UnitName, cdb []byte, in int) (api.ScsiReply, error) {
	r, err := a.daemon().Scsi(ctx, api.ScsiRequest{Unit: unit, CDB: cdb, In: in, SkipAttention: true, Timeout: a.seconds()})
	if err != nil {
		return r, err
	}
	return r, statusError(r)
}

// decoded is the JSON form of what a command found out.
type decoded struct {
	Version int     `json:"version"`
	Value   any     `json:"value"`
	Data    api.Hex `json:"data"`
}

// show prints rows of a name and a value, or v as JSON.
func (a *app) show(v any, data []byte, rows [][2]string) error {
	if a.json {
		return a.print(decoded{api.Version, v, data})
	}
	t := newTable(a.out)
	for _, r := range rows {
		t.row(r[0], r[1])
	}
	return t.flush()
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// unitCommand is a command about one unit that has no arguments beside it.
func (a *app) unitCommand(use, short string, run func(ctx context.Context, unit api.UnitName) error) *cobra.Command {
	var u unitFlag
	c := &cobra.Command{
		Use: use + " " + unitUsage, Short: short, Args: exactly(1, "a device or session"),
		RunE: func(cmd *cobra.Command, args []string) error {
			unit, err := u.name(args[0])
			if err != nil {
				return err
			}
			return run(cmd.Context(), unit)
		},
	}
	u.add(c)
	return c
}

func (a *app) scsiInquiryCommand() *cobra.Command {
	page := ""
	c := a.unitCommand("inquiry", "Show INQUIRY data, or a page of vital product data", func(ctx context.Context, unit api.UnitName) error {
		if page == "" {
			return a.standardInquiry(ctx, unit)
		}
		n, err := strconv.ParseUint(page, 0, 8)
		if err != nil {
			return api.Errorf(api.ErrInvalidArgs, "--page: expected a number such as 0x83")
		}
		return a.vitalPage(ctx, unit, uint8(n))
	})
	c.Flags().StringVar(&page, "page", "", "vital product data: 0 lists the pages, 0x80 serial number, 0x83 designators, 0xb0, 0xb1, 0xb2; others as bytes")
	return c
}

func (a *app) standardInquiry(ctx context.Context, unit api.UnitName) error {
	var cdb scsi.CDB
	scsi.InquiryStandard(&cdb, 255)
	r, err := a.ask(ctx, unit, cdb[:6], 255)
	if err != nil {
		return err
	}
	q, err := scsi.ParseInquiry(r.Data)
	if err != nil {
		return api.Errorf(api.ErrProtocolError, "%w", err)
	}
	return a.show(q, r.Data, [][2]string{
		{"type", q.Type.String()}, {"connected", yes(q.Connected)}, {"vendor", q.Vendor}, {"product", q.Product}, {"revision", q.Revision},
	})
}

// vitalPage shows one page of vital product data.
func (a *app) vitalPage(ctx context.Context, unit api.UnitName, page uint8) error {
	var cdb scsi.CDB
	scsi.InquiryVPD(&cdb, page, 4096)
	r, err := a.ask(ctx, unit, cdb[:6], 4096)
	if err != nil {
		return err
	}
	var v any
	var rows [][2]string
	row := func(name string, value any) { rows = append(rows, [2]string{name, fmt.Sprint(value)}) }
	switch page {
	case scsi.PageSupported:
		var pages []uint8
		if pages, err = scsi.ParseSupportedPages(r.Data); err == nil {
			var names []string
			for _, p := range pages {
				names = append(names, fmt.Sprintf("0x%02x", p))
			}
			v = names
			row("pages", strings.Join(names, " "))
		}
	case scsi.PageSerialNumber:
		var s string
		if s, err = scsi.ParseSerialNumber(r.Data); err == nil {
			v = s
			row("serial", s)
		}
	case scsi.PageIdentification:
		var list []scsi.Designator
		if list, err = scsi.ParseDesignators(r.Data); err == nil {
			row("identity", dash(scsi.Identity(list)))
			for _, d := range list {
				row(designatorKind(d), designatorText(d))
			}
			v = map[string]any{"identity": scsi.Identity(list), "designators": designators(rows[1:])}
		}
	case scsi.PageBlockLimits:
		var l scsi.BlockLimits
		if l, err = scsi.ParseBlockLimits(r.Data); err == nil {
			v = l
			row("maximum transfer", blocks(uint64(l.MaxTransfer)))
			row("optimal transfer", blocks(uint64(l.OptimalTransfer)))
			row("optimal granularity", blocks(uint64(l.OptimalGranularity)))
			row("maximum unmap", blocks(uint64(l.MaxUnmapBlocks)))
			row("unmap descriptors", l.MaxUnmapDescriptors)
			row("unmap granularity", blocks(uint64(l.OptimalUnmapGranularity)))
			row("maximum write same", blocks(l.MaxWriteSame))
		}
	case scsi.PageCharacteristics:
		var c scsi.Characteristics
		if c, err = scsi.ParseCharacteristics(r.Data); err == nil {
			v = c
			row("rotational", yes(c.Rotational()))
		}
	case scsi.PageProvisioning:
		var p scsi.Provisioning
		if p, err = scsi.ParseProvisioning(r.Data); err == nil {
			v = p
			row("UNMAP", yes(p.Unmap))
			row("WRITE SAME(16) unmaps", yes(p.WriteSame16))
			row("WRITE SAME(10) unmaps", yes(p.WriteSame10))
			row("unmapped reads zeros", yes(p.ReadsZeros))
		}
	default:
		if a.json {
			return a.print(decoded{api.Version, nil, r.Data})
		}
		return dump(a.out, r.Data)
	}
	if err != nil {
		return api.Errorf(api.ErrProtocolError, "%w", err)
	}
	return a.show(v, r.Data, rows)
}

func blocks(n uint64) string {
	if n == 0 {
		return "not reported"
	}
	return strconv.FormatUint(n, 10) + " blocks"
}

// designators is the JSON form of rows.
func designators(rows [][2]string) []map[string]string {
	list := []map[string]string{}
	for _, r := range rows {
		list = append(list, map[string]string{"kind": r[0], "id": r[1]})
	}
	return list
}

// designatorKind names a designator by its type and what it belongs to.
func designatorKind(d scsi.Designator) string {
	names := map[uint8]string{
		0: "vendor specific", 1: "T10 vendor", 2: "EUI-64", 3: "NAA", 4: "relative target port", 5: "target port group", 6: "logical unit group", 8: "SCSI name",
	}
	name, ok := names[d.Type]
	if !ok {
		name = fmt.Sprintf("type %d", d.Type)
	}
	switch d.Association {
	case 1:
		name += " (target port)"
	case 2:
		name += " (target)"
	}
	return name
}

func designatorText(d scsi.Designator) string {
	if d.CodeSet == 2 || d.CodeSet == 3 {
		return strings.TrimRight(string(d.ID), "\x00 ")
	}
	return hex.EncodeToString(d.ID)
}

func (a *app) scsiSenseCommand() *cobra.Command {
	return a.unitCommand("sense", "Show what REQUEST SENSE says", func(ctx context.Context, unit api.UnitName) error {
		var cdb scsi.CDB
		scsi.RequestSense(&cdb, 252)
		r, err := a.ask(ctx, unit, cdb[:6], 252)
		if err != nil {
			return err
		}
		s, err := scsi.ParseSense(r.Data)
		if err != nil {
			return api.Errorf(api.ErrProtocolError, "%w", err)
		}
		return a.show(s, r.Data, [][2]string{{"sense", s.String()}})
	})
}

func (a *app) scsiCapacityCommand() *cobra.Command {
	return a.unitCommand("capacity", "Show what READ CAPACITY says", func(ctx context.Context, unit api.UnitName) error {
		var cdb scsi.CDB
		scsi.ReadCapacity16(&cdb, 32)
		parse := scsi.ParseReadCapacity16
		r, err := a.ask(ctx, unit, cdb[:], 32)
		if api.Is(err, api.ErrCommandFailed) { // a unit from before the 16-byte command
			scsi.ReadCapacity10(&cdb)
			parse = scsi.ParseReadCapacity10
			r, err = a.ask(ctx, unit, cdb[:10], 8)
		}
		if err != nil {
			return err
		}
		c, err := parse(r.Data)
		if err != nil {
			return api.Errorf(api.ErrProtocolError, "%w", err)
		}
		return a.show(c, r.Data, [][2]string{
			{"size", size(c.Bytes())}, {"blocks", strconv.FormatUint(c.Blocks(), 10)}, {"block length", strconv.Itoa(int(c.BlockLength))},
			{"physical block length", strconv.Itoa(int(c.PhysicalLength()))}, {"lowest aligned block", strconv.Itoa(int(c.LowestAligned))},
			{"thin", yes(c.Provisioned)}, {"protection type", strconv.Itoa(int(c.ProtectionType))},
		})
	})
}

func (a *app) scsiModesCommand() *cobra.Command {
	return a.unitCommand("modes", "Show write protection and caches, as MODE SENSE says", func(ctx context.Context, unit api.UnitName) error {
		var cdb scsi.CDB
		scsi.ModeSense6(&cdb, scsi.ModePageAll, 252)
		parse := scsi.ParseModeSense6
		r, err := a.ask(ctx, unit, cdb[:6], 252)
		if api.Is(err, api.ErrCommandFailed) {
			scsi.ModeSense10(&cdb, scsi.ModePageAll, 4096)
			parse = scsi.ParseModeSense10
			r, err = a.ask(ctx, unit, cdb[:10], 4096)
		}
		if err != nil {
			return err
		}
		m, err := parse(r.Data)
		if err != nil {
			return api.Errorf(api.ErrProtocolError, "%w", err)
		}
		rows := [][2]string{{"write protected", yes(m.WriteProtected)}, {"DPO and FUA", yes(m.DPOFUA)}}
		if m.Caching {
			rows = append(rows, [2]string{"write cache", yes(m.WCE)}, [2]string{"read cache", yes(!m.RCD)})
		}
		return a.show(m, r.Data, rows)
	})
}

// unitRow is one line of luns.
type unitRow struct {
	LUN    string `json:"lun"`    // 8 bytes, hexadecimal
	Number uint64 `json:"number"` // as a person counts
}

func (a *app) scsiLunsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "luns " + unitUsage, Short: "List the logical units of a target, as REPORT LUNS says now", Args: exactly(1, "a device or session"),
		RunE: func(cmd *cobra.Command, args []string) error {
			u := unitFlag{lun: 0} // answers for all
			if strings.HasPrefix(strings.TrimPrefix(args[0], "/dev/"), "ublkb") {
				u.lun = -1
			}
			unit, err := u.name(args[0])
			if err != nil {
				return err
			}
			var cdb scsi.CDB
			scsi.ReportLuns(&cdb, 64<<10)
			r, err := a.ask(cmd.Context(), unit, cdb[:12], 64<<10)
			if err != nil {
				return err
			}
			luns, _, err := scsi.ParseReportLuns(r.Data)
			if err != nil {
				return api.Errorf(api.ErrProtocolError, "%w", err)
			}
			rows := []unitRow{}
			for _, l := range luns {
				rows = append(rows, unitRow{fmt.Sprintf("%#016x", uint64(l)), l.Number()})
			}
			if a.json {
				return a.print(decoded{api.Version, rows, r.Data})
			}
			t := newTable(a.out, "LUN", "ADDRESS")
			for _, x := range rows {
				t.row(strconv.FormatUint(x.Number, 10), x.LUN)
			}
			return t.flush()
		},
	}
}
