package profile

import (
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/test/bench/plan"
)

func TestSupported(t *testing.T) {
	for version, ok := range map[string]bool{"4.2.0": true, "7.2.22": true, "8.2.1": true, "4.1.0": false, "9.0.0": false, "10.0.3": false, "unknown": false, "": false} {
		if err := Supported(version); (err == nil) != ok {
			t.Errorf("%q: %v", version, err)
		}
	}
}

func TestReadBlocks(t *testing.T) {
	file := filepath.Join(t.TempDir(), "counts")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("ffffffff81000000 5 10\n401000 3 1\nend\n")
	got, err := ReadBlocks(file)
	if want := []Block{{0xffffffff81000000, 50}, {0x401000, 3}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	for _, bad := range []string{"", "401000 3 1\n", "401000 3\nend\n", "x y z\nend\n"} {
		write(bad)
		if got, err := ReadBlocks(file); err == nil {
			t.Errorf("%q gives %v", bad, got)
		}
	}
}

const kallsyms = `0000000000000000 A fixed_percpu_data
ffffffff81000000 T _stext
ffffffff81000100 t memcpy_orig
ffffffff81000200 T io_read
ffffffff81000300 T io_schedule
ffffffff81000380 D some_data
ffffffffc0001000 t ublk_ch_uring_cmd	[ublk_drv]
ffffffffc0002000 t iser_post_sendm	[ib_iser]
ffffffffc0003000 t crc32_thing	[unheard_of]
ffffffffc0003100 t whatever	[unheard_of]
`

func TestKallsyms(t *testing.T) {
	k, err := readKallsyms(strings.NewReader(kallsyms))
	if err != nil {
		t.Fatal(err)
	}
	for address, want := range map[uint64]symbol{
		0xffffffff81000100: {0xffffffff81000100, "memcpy_orig", ""},
		0xffffffff810001ff: {0xffffffff81000100, "memcpy_orig", ""},
		0xffffffff81000390: {0xffffffff81000300, "io_schedule", ""}, // data is no function
		0xffffffffc0001800: {0xffffffffc0001000, "ublk_ch_uring_cmd", "ublk_drv"},
	} {
		if got, ok := k.find(address); !ok || got != want {
			t.Errorf("%#x: %v, want %v", address, got, want)
		}
	}
	if s, ok := k.find(5); ok {
		t.Errorf("below all there is %v", s)
	}
	for _, bad := range []string{"", "0000000000000000 T _stext\n", "zz T x\n", "12\n"} {
		if k, err := readKallsyms(strings.NewReader(bad)); err == nil {
			t.Errorf("%q gives %v", bad, k)
		}
	}
}

func TestKernelPlace(t *testing.T) {
	for _, tc := range []struct{ name, module, place string }{
		{"ublk_ch_uring_cmd", "ublk_drv", plan.PlaceUblk},
		{"iser_post_sendm", "ib_iser", plan.PlaceKernel},
		{"rxe_requester", "rdma_rxe", plan.PlaceRXE},
		{"ib_uverbs_write", "ib_uverbs", plan.PlaceVerbs},
		{"rep_movs_alternative", "", plan.PlaceCopy},
		{"memset_orig", "", plan.PlaceCopy},
		{"crc32_le", "", plan.PlaceCRC},
		{"crc32_thing", "unheard_of", plan.PlaceCRC}, // modules that are not known are judged by name
		{"whatever", "unheard_of", plan.PlaceOther},
		{"io_schedule", "", plan.PlaceSchedule},
		{"io_submit_sqes", "", plan.PlaceIOUring},
		{"__x64_sys_io_uring_enter", "", plan.PlaceIOUring},
		{"blk_mq_submit_bio", "", plan.PlaceBlock},
		{"gup_fast_fallback", "", plan.PlaceBlock},
		{"try_to_wake_up", "", plan.PlaceSchedule},
		{"process_one_work", "", plan.PlaceSchedule},
		{"__alloc_skb", "", plan.PlaceNet},
		{"__local_bh_enable_ip", "", plan.PlaceNet},
		{"entry_SYSCALL_64", "", plan.PlaceEntry},
		{"do_syscall_64", "", plan.PlaceEntry},
		{"handle_softirqs", "", plan.PlaceEntry},
		{"kmem_cache_alloc_noprof", "", plan.PlaceMemory},
		{"_raw_spin_lock_irqsave", "", plan.PlaceLocks},
		{"xas_load", "", plan.PlaceOther},
		{"", "", plan.PlaceOther},
	} {
		if got := kernelPlace(symbol{name: tc.name, module: tc.module}); got != tc.place {
			t.Errorf("%s [%s] is of %s, want %s", tc.name, tc.module, got, tc.place)
		}
	}
}

// needGCC skips where there is no compiler.
func needGCC(t *testing.T) {
	t.Helper()
	_, err := exec.LookPath("gcc")
	require.Need(t, "gcc", err)
}

// program makes a program at a fixed address, as Go's linker does, and returns the address of its function "work".
func program(t *testing.T) (file string, address uint64) {
	t.Helper()
	needGCC(t)
	file = filepath.Join(t.TempDir(), "program")
	cmd := exec.Command("gcc", "-no-pie", "-o", file, "-x", "c", "-")
	cmd.Stdin = strings.NewReader("int work(int n) { return n + 1; }\nint main(void) { return work(-1); }\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v: %s", err, out)
	}
	f, err := elf.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.Symbols()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(symbols, func(s elf.Symbol) bool { return s.Name == "work" })
	if i < 0 {
		t.Fatal("it has no symbol work")
	}
	return file, symbols[i].Value
}

func TestAttribute(t *testing.T) {
	file, address := program(t)
	syms := filepath.Join(t.TempDir(), "kallsyms")
	if err := os.WriteFile(syms, []byte(kallsyms), 0o600); err != nil {
		t.Fatal(err)
	}
	maps := map[string]string{
		plan.PlaceDaemon: fmt.Sprintf("%x-%x r-xp 00000000 08:01 5 /usr/local/bin/iserd-io\n", address&^0xfff, address&^0xfff+0x10000) +
			"7f0000000000-7f0000001000 r-xp 00000000 08:01 6 /usr/lib/librxe-rdmav34.so\n7f0000001000-7f0000002000 rw-p 00000000 08:01 6 /usr/lib/librxe-rdmav34.so\n",
		plan.PlaceFio: "7e0000000000-7e0000001000 r-xp 00000000 08:01 7 /usr/bin/fio\n7e0000001000-7e0000002000 r-xp 00000000 00:00 0\n",
	}
	blocks := []Block{
		{0xffffffff81000210, 100}, {0xffffffff81000220, 1}, {0xffffffffc0001004, 20},
		{address, 30}, {0x7f0000000010, 40}, {0x7f0000001010, 3}, // the last is data, and nobody's code
		{0x7e0000000010, 50}, {0x7e0000001010, 5}, {0x1234, 2},
	}
	p, err := Attribute(blocks, syms, file, maps)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]uint64{plan.PlaceIOUring: 101, plan.PlaceUblk: 20, plan.PlaceDaemon: 70, plan.PlaceFio: 55, plan.PlaceOtherUser: 5}
	for place, n := range want {
		if p.Places[place] != n {
			t.Errorf("%s: %d instructions, want %d", place, p.Places[place], n)
		}
	}
	if len(p.Places) != len(want) || p.Total() != 251 {
		t.Errorf("places %v, %d in all", p.Places, p.Total())
	}
	if p.Functions[0] != (Function{plan.PlaceIOUring, "io_read", 101}) {
		t.Errorf("the first function is %v", p.Functions[0])
	}
	for _, f := range []Function{
		{plan.PlaceDaemon, "work", 30}, {plan.PlaceDaemon, "librxe-rdmav34.so", 40}, {plan.PlaceUblk, "ublk_ch_uring_cmd [ublk_drv]", 20},
		{plan.PlaceFio, "anonymous", 5},
	} {
		if !slices.Contains(p.Functions, f) {
			t.Errorf("%v is missing in %v", f, p.Functions)
		}
	}
}

// The plugin compiles without a warning, and exports what QEMU looks for.
func TestBuild(t *testing.T) {
	needGCC(t)
	file, err := Build(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f, err := elf.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"qemu_plugin_install", "qemu_plugin_version"} {
		if !slices.ContainsFunc(symbols, func(s elf.Symbol) bool { return s.Name == want && s.Section != elf.SHN_UNDEF }) {
			t.Errorf("it does not export %s", want)
		}
	}
}
