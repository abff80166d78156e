"""The words that the tiny tokenizer knows whole: what any page and any instruction on the web is made of.

Written by hand, before any MiniWoB++ page was looked at for it; it holds no name, country, random string or
other *content* of those pages. Every other word is spelled in pieces of two characters (see base.py).
"""

WORDS = """
a about above account across action active add address after again all allow alert also always an and another answer any
apply are area arrow article ask at available away back bar be because been before begin below between black blank blue book
both bottom box brown browse button buttons buy by call can cancel card cart cell change chart chat check checkbox checked
choice choose clear click close code color column comment complete confirm contact contains content continue copy correct
cost could country create current customer data date day default delete delivery description details dialog did different
directory do document does done down download drag drop each edit eight element email empty end enter error event every
example exit expand false female field fields file fill filter find finish first five folder following for form found four
free from full game gender get give go good gray green group has have height help here hidden hide high hint history home
hour how icon id if image in index info information input inside instruction into is it item items its keep key label
language large last left less letter level light line link links list listed load location log login long low mail main make
male many map mark match max may media menu message middle min minute missing mode month more most move must my name names
navigate need never new next nine no none not note now number numbers of off ok old on one only open option options or orange
order other out over page panel paper part password past paste people phone photo pink place play please plus point post
press previous price print product profile purple question quick radio random range rate read record red region remove
repeat reply required reset result results return review right role room root row same save scroll search second section
see select selected send sequence set settings seven share shop should show sign silver site six size small some sort space
start state status step stop store street string submit sum support switch tab table tabs tag target task ten text than that
the their them then there these they third this those three through time title to today too tool top total tree true turn
two type under unit until up update upload use used user username using value values view visible was way web week welcome
what when where which white who why will window with word words work write year yellow yes you your zip zoom
"""
