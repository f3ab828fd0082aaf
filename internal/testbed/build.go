package testbed

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"iserd.org/iserd/internal/require"
)

// Programs are the commands of the project.
var Programs = []string{"./cmd/iserd", "./cmd/iserd-io", "./cmd/iserctl"}

// Build compiles main packages of the project into folder dir, which is made when missing. They run on the host and in the guest alike.
func Build(ctx context.Context, dir string, packages ...string) error {
	return goTool(ctx, append([]string{"build", "-o", dir + string(filepath.Separator)}, packages...)...)
}

// InstallPrograms compiles main packages of the project and puts them into the guest's [Bin].
func (g *Guest) InstallPrograms(ctx context.Context, packages ...string) error {
	dir := filepath.Join(g.dir, "programs")
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := Build(ctx, dir, packages...); err != nil {
		return err
	}
	programs, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		return err
	}
	return g.Upload(ctx, Bin, programs...)
}

// InstallVersion compiles a main package as version, as a release is stamped, and puts it into the guest's [Bin] under a name of its own.
func (g *Guest) InstallVersion(ctx context.Context, name, pkg, version string) error {
	file := filepath.Join(g.dir, name)
	if err := goTool(ctx, "build", "-ldflags", "-X iserd.org/iserd/internal/version.number="+version, "-o", file, pkg); err != nil {
		return err
	}
	return g.Upload(ctx, Bin, file)
}

// BuildTest compiles the test binary of a package to a file. A package without tests gives no file and no error.
func BuildTest(ctx context.Context, file, pkg string) error {
	return goTool(ctx, "test", "-c", "-o", file, pkg)
}

func goTool(ctx context.Context, args ...string) error {
	root, err := ModuleRoot()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1", "GOOS=linux", "GOARCH=amd64")
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("go %s: %w\n\t%s", strings.Join(args, " "), err, strings.Join(lastLines(out, 30), "\n\t"))
}

// Wanted reports whether tests that boot a guest are asked for: by GUEST=1, or by REQUIRE with guest in its list. They take minutes and
// fill a cache, which a plain go test should not do.
func Wanted() bool { return os.Getenv("GUEST") == "1" || require.Demanded("guest") }
