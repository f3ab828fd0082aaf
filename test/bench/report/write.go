package report

// Write writes the results of a folder, the plots, and the generated parts of its README.
func (r *Results) Write(dir string) error {
	if err := r.Save(dir); err != nil {
		return err
	}
	if err := r.plots(dir); err != nil {
		return err
	}
	return r.sections().fillFile(dir)
}
