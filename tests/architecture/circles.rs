//! Files that use each other in a circle.

use std::collections::BTreeSet;

use crate::sources::Sources;

/// Groups of files each of which leads to all others of its group, with what ties them.
pub fn circles(sources: &Sources) -> Vec<String> {
    let uses: Vec<_> = (0..sources.files.len())
        .map(|file| sources.uses(file))
        .collect();
    let reached: Vec<_> = (0..uses.len())
        .map(|file| {
            let mut reached = BTreeSet::new();
            let mut open = vec![file];
            while let Some(file) = open.pop() {
                open.extend(uses[file].keys().filter(|&&next| reached.insert(next)));
            }
            reached
        })
        .collect();
    let mut circles = Vec::new();
    let mut told = BTreeSet::new();
    for file in 0..uses.len() {
        if !reached[file].contains(&file) || told.contains(&file) {
            continue;
        }
        let is_member = |other: &usize| reached[*other].contains(&file);
        let members: BTreeSet<_> = reached[file].iter().copied().filter(is_member).collect();
        let mut ties = Vec::new();
        for &member in &members {
            for (used, names) in uses[member]
                .iter()
                .filter(|(used, _)| members.contains(used))
            {
                ties.push(format!(
                    "{} uses {} of {}",
                    sources.files[member].path.display(),
                    names
                        .iter()
                        .map(String::as_str)
                        .collect::<Vec<_>>()
                        .join(", "),
                    sources.files[*used].path.display()
                ));
            }
        }
        circles.push(ties.join("\n"));
        told.extend(members);
    }
    circles
}
