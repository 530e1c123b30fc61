//! The few file operations that a checkpoint needs, so that tests can fail or stop at each of them.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::Path,
};

/// A file being written.
pub trait StoredFile: Write {
    /// Flushes buffers and waits until the content is on stable storage.
    fn sync(&mut self) -> io::Result<()>;
}

/// A place for checkpoints.
pub trait Storage: Send + Sync {
    /// Makes a folder; its parent exists.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes a file that does not exist yet.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StoredFile>>;
    /// Makes the entries of a folder durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames; replaces a file at `to`.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes a folder and what it holds.
    fn remove_dir_all(&self, path: &Path) -> io::Result<()>;
}

/// The file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskStorage;

struct DiskFile(BufWriter<File>);

impl Write for DiskFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl StoredFile for DiskFile {
    fn sync(&mut self) -> io::Result<()> {
        self.0.flush()?;
        self.0.get_ref().sync_all()
    }
}

impl Storage for DiskStorage {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        let file = File::options().write(true).create_new(true).open(path)?;
        Ok(Box::new(DiskFile(BufWriter::with_capacity(1 << 20, file))))
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}
