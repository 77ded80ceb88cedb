//! Tar archives that depend on nothing but their files and a date.

use std::io::{self, Write};

use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

use super::date::Date;
use super::tree::{Entry, Tree};

/// A tar archive, compressed with gzip: folders first, everything sorted and owned by root, with this date.
pub fn compressed(tree: &Tree, date: Date) -> io::Result<Vec<u8>> {
    // The best level takes twice the time for a hundredth of the bytes.
    gzip_at(Compression::default(), &archive(tree, date)?)
}

/// Compresses with gzip as well as it can, without a name or a date.
pub fn gzip(bytes: &[u8]) -> io::Result<Vec<u8>> {
    gzip_at(Compression::best(), bytes)
}

fn gzip_at(level: Compression, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzBuilder::new().mtime(0).write(Vec::new(), level);
    encoder.write_all(bytes)?;
    encoder.finish()
}

fn archive(tree: &Tree, date: Date) -> io::Result<Vec<u8>> {
    let mut builder = Builder::new(Vec::new());
    for folder in tree.folders() {
        let mut header = header(EntryType::Directory, 0o755, date);
        builder.append_data(&mut header, format!("{folder}/"), io::empty())?;
    }
    for (path, entry) in tree.entries() {
        match entry {
            Entry::File(bytes) => append_file(&mut builder, path, bytes, 0o644, date)?,
            Entry::Program(bytes) => append_file(&mut builder, path, bytes, 0o755, date)?,
            Entry::Link(target) => {
                let mut header = header(EntryType::Symlink, 0o777, date);
                builder.append_link(&mut header, path, target)?;
            }
        }
    }
    builder.into_inner()
}

fn append_file(
    builder: &mut Builder<Vec<u8>>,
    path: &str,
    bytes: &[u8],
    mode: u32,
    date: Date,
) -> io::Result<()> {
    let mut header = header(EntryType::Regular, mode, date);
    header.set_size(bytes.len() as u64);
    builder.append_data(&mut header, path, bytes)
}

fn header(kind: EntryType, mode: u32, date: Date) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(date.seconds());
    header.set_size(0);
    header
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;
    use tar::Archive;

    use super::*;

    /// Type, mode, owner, group and date of each entry, and its content or target.
    fn listed(compressed: &[u8]) -> Vec<(String, String)> {
        let mut archive = Archive::new(GzDecoder::new(compressed));
        let entries = archive.entries().expect("it is an archive");
        entries
            .map(|entry| {
                let mut entry = entry.expect("it is an entry");
                let mut content = String::new();
                entry.read_to_string(&mut content).expect("it is a text");
                let path = entry.path().expect("it has a path");
                let path = path.display().to_string();
                let header = entry.header();
                let target = header.link_name().expect("a path or none");
                let target = target.map_or(content, |target| target.display().to_string());
                let number = |number: std::io::Result<u64>| number.expect("it is a number");
                let about = format!(
                    "{:?} {:o} {} {} {} {target}",
                    header.entry_type(),
                    header.mode().expect("it is a number"),
                    number(header.uid()),
                    number(header.gid()),
                    number(header.mtime()),
                );
                (path, about)
            })
            .collect()
    }

    #[test]
    fn an_archive_has_folders_first_and_everything_sorted_and_dated() {
        // Longer than a name in the header of an entry.
        let long = format!("{}/{}", "b".repeat(90), "c".repeat(90));
        let mut tree = Tree::default();
        tree.insert(long.clone(), Entry::File(b"text".into()));
        tree.insert("a/program", Entry::Program(b"run".into()));
        tree.insert("a/link", Entry::Link("program".into()));
        let date = Date::parse("1700000000").expect("it is a number");
        let packed = compressed(&tree, date).expect("memory can be written");
        let expected = [
            ("a/", "Directory 755 0 0 1700000000 "),
            (
                &format!("{}/", "b".repeat(90)),
                "Directory 755 0 0 1700000000 ",
            ),
            ("a/link", "Symlink 777 0 0 1700000000 program"),
            ("a/program", "Regular 755 0 0 1700000000 run"),
            (&long, "Regular 644 0 0 1700000000 text"),
        ];
        let expected = expected.map(|(path, about)| (path.to_owned(), about.to_owned()));
        assert_eq!(listed(&packed), expected);
        assert_eq!(
            packed,
            compressed(&tree, date).expect("memory can be written")
        );
        let later = Date::parse("1700000001").expect("it is a number");
        assert_ne!(
            packed,
            compressed(&tree, later).expect("memory can be written")
        );
    }
}
