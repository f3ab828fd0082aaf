package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"iserd.org/iserd/api"
)

func (a *app) bufferListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List shared memory",
		Long: "List memory that is registered with block devices, and how many requests moved their data in it without a copy. A slice belongs to\n" +
			"the arena, from which programs borrow on the bus; the others were brought by a program, added or adopted.",
		Args: exactly(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := a.daemon().Buffers(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.print(r)
			}
			if len(r.Buffers) == 0 {
				a.warn("no shared memory")
				return nil
			}
			return a.bufferTable(r)
		},
	}
}

func (a *app) bufferTable(r api.BuffersReply) error {
	t := newTable(a.out, "BUFFER", "KIND", "SIZE", "PAGES", "OWNER", "STATE", "DEVICES", "REQUESTS", "BYTES", "HITS", "FILE")
	for i := range r.Buffers {
		b := &r.Buffers[i]
		var devs []string
		for _, d := range b.Devices {
			name := strings.TrimPrefix(d.Path, "/dev/")
			if d.State != api.BufferRegistered {
				name += " (" + d.State + ")"
			}
			devs = append(devs, name)
		}
		hits := "yes"
		if b.Requests == 0 {
			hits = "none yet"
		}
		t.row(strconv.FormatUint(uint64(b.ID), 10), b.Kind, size(b.Length), size(b.PageSize), owner(b), b.State, dash(strings.Join(devs, ",")),
			strconv.FormatUint(b.Requests, 10), size(b.Bytes), hits, dash(b.Path))
	}
	if err := t.flush(); err != nil {
		return err
	}
	for _, n := range r.Notes {
		a.warn("left out: %s", n)
	}
	for _, b := range r.Buffers {
		for _, d := range b.Devices {
			if d.Reason != "" {
				a.warn("buffer %d, %s: %s", b.ID, d.Path, d.Reason)
			}
		}
	}
	return nil
}

// owner tells whose memory it is.
func owner(b *api.Buffer) string {
	switch {
	case b.Kind == api.BufferSlice && b.Owner == "":
		return "-"
	case b.PID != 0:
		return fmt.Sprintf("pid %d", b.PID)
	case b.Owner != "":
		return fmt.Sprintf("uid %d, %s", b.UID, b.Owner)
	}
	return fmt.Sprintf("uid %d", b.UID)
}

// bytes reads a number of bytes with an optional K, M or G.
func bytes(s string) (uint64, error) {
	shift := 0
	for i, u := range []string{"K", "M", "G"} {
		if rest, ok := strings.CutSuffix(strings.ToUpper(s), u); ok {
			s, shift = rest, 10*(i+1)
		}
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || n > 1<<62>>shift {
		return 0, api.Errorf(api.ErrInvalidArgs, "%q: expected a number of bytes, such as 65536, 64K or 2M", s)
	}
	return n << shift, nil
}

func (a *app) bufferAddCommand() *cobra.Command {
	r := api.BufferAddRequest{}
	var offset, length string
	c := &cobra.Command{
		Use: "add PATH", Short: "Register a file on tmpfs or hugetlbfs",
		Long: "Register a file on tmpfs or hugetlbfs that programs map for their I/O, such as fio with --mem=mmaphuge:PATH. The file has to exist in\n" +
			"its full size. It stays registered until \"iserctl buffer remove\", also when it is deleted or the daemon restarts; do not\n" +
			"truncate it meanwhile: pages that were cut off stay pinned, and what is written to the file later is other memory.",
		Args: exactly(1, "the path of a file"),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if r.Path, err = filepath.Abs(args[0]); err != nil {
				return api.Errorf(api.ErrInvalidArgs, "%w", err)
			}
			if r.Offset, err = bytes(offset); err != nil {
				return err
			}
			if r.Length, err = bytes(length); err != nil {
				return err
			}
			reply, err := a.daemon().AddBuffer(cmd.Context(), r)
			if err != nil {
				return err
			}
			return a.showBuffers(reply)
		},
	}
	c.Flags().StringSliceVar(&r.Devices, "device", nil, "only with this device; may be repeated (default: all, and those that will be made)")
	c.Flags().StringVar(&offset, "offset", "0", "where the range begins, bytes; K, M and G are understood")
	c.Flags().StringVar(&length, "length", "0", "how long it is, bytes; 0: up to the end of the file")
	return c
}

func (a *app) showBuffers(r api.BuffersReply) error {
	if a.json {
		return a.print(r)
	}
	return a.bufferTable(r)
}

func (a *app) bufferAdoptCommand() *cobra.Command {
	r := api.BufferAdoptRequest{}
	var minimum string
	c := &cobra.Command{
		Use: "adopt PID", Short: "Register the shared memory of a process that knows nothing of it",
		Long: "Register every writable shared mapping of a process (memfd, shared anonymous memory, tmpfs, hugetlbfs, SysV), so that its O_DIRECT I/O\n" +
			"from there needs no copy. It ends when the process ends, executes another program or unmaps the memory.",
		Args: exactly(1, "the number of a process"),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if r.PID, err = processID(args[0]); err != nil {
				return err
			}
			if r.Minimum, err = bytes(minimum); err != nil {
				return err
			}
			reply, err := a.daemon().AdoptProcess(cmd.Context(), r)
			if err != nil {
				return err
			}
			return a.showBuffers(reply)
		},
	}
	c.Flags().StringSliceVar(&r.Devices, "device", nil, "only with this device; may be repeated (default: all, and those that will be made)")
	c.Flags().StringVar(&minimum, "minimum", "64K", "leave out what is smaller, bytes; K, M and G are understood")
	return c
}

func processID(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n <= 0 {
		return 0, api.Errorf(api.ErrInvalidArgs, "%q: expected the number of a process", s)
	}
	return n, nil
}

func (a *app) bufferRemoveCommand() *cobra.Command {
	pid := ""
	c := &cobra.Command{
		Use: "remove BUFFER | --pid PID", Short: "End the registration of memory, or take a slice back", Args: atMostOne,
		Long: "End the registration of memory: of one buffer, or of all of an adopted process. A slice that is lent goes back to the arena. Requests\n" +
			"are not disturbed: those from that memory are copied from then on.",
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			r := api.BufferRemoveRequest{}
			switch {
			case len(args) == 1 && pid == "":
				n, err := strconv.ParseUint(args[0], 10, 32)
				if err != nil || n == 0 {
					return api.Errorf(api.ErrInvalidArgs, "%q: expected the number of a buffer; see: iserctl buffer list", args[0])
				}
				r.ID = uint32(n)
			case len(args) == 0 && pid != "":
				if r.PID, err = processID(pid); err != nil {
					return err
				}
			default:
				return api.Errorf(api.ErrInvalidArgs, "expected a buffer or --pid")
			}
			reply, err := a.daemon().RemoveBuffer(cmd.Context(), r)
			if err != nil {
				return err
			}
			if a.json {
				return a.print(reply)
			}
			for _, b := range reply.Buffers {
				var waits []string
				for _, d := range b.Devices {
					waits = append(waits, d.Path)
				}
				switch {
				case b.Kind == api.BufferSlice:
					fmt.Fprintf(a.out, "Took buffer %d back.\n", b.ID)
				case len(waits) > 0:
					fmt.Fprintf(a.out, "Buffer %d goes as soon as the session of %s is up or ended.\n", b.ID, strings.Join(waits, ", "))
				default:
					fmt.Fprintf(a.out, "Removed buffer %d.\n", b.ID)
				}
			}
			return nil
		},
	}
	c.Flags().StringVar(&pid, "pid", "", "all memory of this adopted process")
	return c
}

func (a *app) bufferArenaCommand() *cobra.Command {
	return &cobra.Command{
		Use: "arena", Short: "Show the memory that is there to be lent, and who has it", Args: exactly(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := a.daemon().Buffers(cmd.Context())
			if err != nil {
				return err
			}
			r.Buffers = slices.DeleteFunc(r.Buffers, func(b api.Buffer) bool { return b.Kind != api.BufferSlice })
			if a.json {
				return a.print(r)
			}
			t := newTable(a.out)
			x := &r.Arena
			t.row("slices", fmt.Sprintf("%d of %s", x.Slices, size(x.SliceSize)))
			t.row("free", strconv.Itoa(x.Free))
			t.row("lent", strconv.Itoa(x.Lent))
			t.row("returned", strconv.Itoa(x.Returned))
			if x.Reason != "" {
				t.row("reason", x.Reason)
			}
			if err := t.flush(); err != nil || len(r.Buffers) == 0 {
				return err
			}
			return a.bufferTable(r)
		},
	}
}
